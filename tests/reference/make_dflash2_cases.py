"""Make small random pairs with DFlash 2 drafters and record what the DFlash reference does.

Needs torch, transformers and dflash, not JAX:
`python make_dflash2_cases.py --seed N --out DIR [--count 30 | --turn N]`. README.md beside this
file describes what is written.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import dflash.model
import torch
from dflash.model import DFlash2DraftModel, dflash_generate, extract_context_feature
from reference_cases import plain_run
from reference_gemma import randomise as randomise_gemma
from reference_hybrid import exact_rollback
from reference_hybrid import randomise as randomise_hybrid
from reference_muse import randomise as randomise_muse
from reference_pairs import (
    BY_SIGMOID,
    FAMILIES,
    GEMMAS,
    HYBRIDS,
    WITH_EXPERTS,
    Experts,
    families_of_turn,
    halved,
    round_weights,
)
from reference_sigmoid import randomise_corrections
from reference_windows import randomise_gpt_oss
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen3Config
from transformers.utils.logging import disable_progress_bar

dflash.model._cuda_time = time.perf_counter  # return_stats asks for CUDA's clock

CASES = 4  # of a pair
TEXTS, PROMPT, NEW = 24, 14, 30  # what a drafter learns: the greedy text of so many prompts
NOISE = 1e-5  # relative, on all weights: a case that it changes hangs on rounding
CLOSE = 0.05  # of MIN_GAP: a lead that rounding may turn
ATTEMPTS = 40  # draws of one pair
SET_ATTEMPTS = 3
TEMPERATURE = 0.7  # of the recorded draft probabilities
SPLIT = 9  # tokens before the block of the recorded forward
KINDS = ("sliding_attention", "full_attention")


def random_target(family: str, renormalise: bool, draw: random.Random) -> PreTrainedModel:
    config_class, model_class = FAMILIES[family]
    hidden, heads = draw.choice([16, 24, 32]), draw.choice([1, 2, 4])
    draw.random()  # once for `renormalise`: what follows is that of the committed set's seed
    experts = Experts(4, 2, 24, renormalise, 1, (), False)
    of_two_kinds = (*HYBRIDS, *GEMMAS, "muse_glimmer")
    fewest = 2 if family in of_two_kinds else 1  # of each kind one
    config = config_class(
        vocab_size=draw.randrange(40, 90), hidden_size=hidden, intermediate_size=40,
        num_hidden_layers=max(fewest, draw.choice([1, 2, 3])), num_attention_heads=heads,
        num_key_value_heads=draw.choice([h for h in (1, 2, 4) if heads % h == 0]), head_dim=8,
        tie_word_embeddings=draw.random() < 0.3, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
        **(experts.config() if family in WITH_EXPERTS else {}),
    )  # fmt: skip
    model = model_class(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.normal_(0, 0.3)
        elif "embed" in name or "lm_head" in name:
            parameter.normal_(0, 3.0 / hidden**0.5)
        else:
            parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
    if family == "gpt_oss":
        randomise_gpt_oss(model)
    if family in BY_SIGMOID:
        randomise_corrections(model)
    if family in HYBRIDS:
        randomise_hybrid(model)
    if family == "muse_glimmer":
        randomise_muse(model)
    if family in GEMMAS:
        randomise_gemma(model)
    round_weights(model)
    return model


def random_windows(number: int, draw: random.Random) -> dict:
    """Keys of a config whose layers, or some of them, have a window: causal ones or two-sided."""
    kinds = ["sliding_attention", *(draw.choice(KINDS) for _ in range(number - 1))]
    keys = {"layer_types": draw.sample(kinds, number), "use_sliding_window": True}
    keys["sliding_window"] = draw.choice([2, 5, 9, 14, 21])
    is_causal = draw.choice([None, True, False, False])
    return keys if is_causal is None else keys | {"is_causal": is_causal}


def untrained_drafter(
    target: PreTrainedModel, windowed: bool, draw: random.Random
) -> DFlash2DraftModel:
    c = target.config.get_text_config()
    layers = c.num_hidden_layers
    taps = draw.sample(range(layers), draw.randint(1, layers))
    inner = {
        "mask_token_id": draw.randrange(c.vocab_size),
        "target_layer_ids": taps,
        "block_size": draw.choice([2, 3, 4, 5, 6, 8, 11, 16]),
        # Not 4: a last block of two rows is an error in dflash 0.1.0 then.
        "conv_kernel_size": draw.choice([1, 2, 2, 3]),
        "conv_group_size": draw.choice([g for g in (1, 2, 4, 8, 16) if c.hidden_size % g == 0]),
        "selector_rank": draw.choice([1, 4, 8, 16, 24]),
        "selector_top_k": draw.choice([1, 2, 4, 8, 16, 16]),
    }
    if draw.random() < 0.4:
        inner["output_multiplier"] = 0.4
    if draw.random() < 0.4:
        inner["final_logit_softcapping"] = 6.0
    if draw.random() < 0.3:
        inner["input_embedding_scale"] = 1.7
    elif c.model_type in GEMMAS:  # without the key dflash 0.1.0 takes rows as they are
        inner["input_embedding_scale"] = c.hidden_size**0.5
    own_layers = draw.choice([1, 2])
    outer: dict = {"num_target_layers": layers, "layer_types": ["full_attention"] * own_layers}
    if windowed:
        outer |= random_windows(own_layers, draw)
    elif draw.random() < 0.5:
        outer["is_causal"] = draw.choice([True, False])
    for key in [k for k in inner if draw.random() < 0.3]:  # published files differ in the place
        outer[key] = inner.pop(key)
    config = Qwen3Config(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=32,
        num_hidden_layers=own_layers, num_attention_heads=2,
        num_key_value_heads=draw.choice([1, 2]), head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, dflash_config=inner, **outer,
    )  # fmt: skip
    drafter = DFlash2DraftModel(config)
    randomise(drafter)
    return drafter


@torch.no_grad()
def randomise(drafter: DFlash2DraftModel) -> None:
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif "base_kernel" in name:  # the row itself above all
            parameter.normal_(0, 0.3)[:, 0] += 1
        elif "codebook" in name:
            parameter.normal_(0, 0.5)
        else:
            gain = 0.3 if "kernel_projection" in name else 0.8
            parameter.normal_(0, gain / parameter.shape[1] ** 0.5)


@torch.no_grad()
def greedy_texts(target: PreTrainedModel, draw: random.Random) -> torch.Tensor:
    vocab = target.config.get_text_config().vocab_size
    ids = torch.tensor([[draw.randrange(vocab) for _ in range(PROMPT)] for _ in range(TEXTS)])
    for _ in range(NEW + 16):
        ids = torch.cat([ids, target(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def block_hidden(drafter, target, features, ids, start: int) -> torch.Tensor:
    """Hidden states of the masked rows of the blocks whose anchor is token `start`."""
    width = drafter.block_size
    block = torch.full((len(ids), width), drafter.mask_token_id)
    block[:, 0] = ids[:, start]
    scale = float(dflash.model._draft_value(drafter.config, "input_embedding_scale", 1.0))
    return drafter(
        target_hidden=features[:, :start],
        noise_embedding=target.get_input_embeddings().weight[block] * scale,
        position_ids=torch.arange(start + width)[None],
    )[:, 1:]


def train(drafter: DFlash2DraftModel, target, ids: torch.Tensor, steps: int = 120) -> None:
    """Until it foresees some of these texts: cross-entropy of the head's and selector's scores."""
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
        features = extract_context_feature(states, drafter.target_layer_ids)
    selector, width = drafter.candidate_selector, drafter.block_size
    optimiser = torch.optim.Adam(drafter.parameters(), lr=8e-3)
    for _ in range(steps):
        start = random.randrange(PROMPT - 1, PROMPT + NEW)
        hidden = block_hidden(drafter, target, features, ids, start)
        logits = drafter.compute_logits(hidden, target.lm_head)
        previous, labels = (ids[:, start + i : start + i + width - 1] for i in (0, 1))
        left = selector.predecessor_codebook(previous) * selector.hidden_projection(hidden)
        scores = logits + left @ selector.successor_codebook.weight.T
        loss = sum(F.cross_entropy(x.flatten(0, 1), labels.flatten()) for x in (logits, scores))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    drafter.eval().requires_grad_(False)
    round_weights(drafter)


def save(target, drafter, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    target.save_pretrained(folder / "target", **halved(target))
    drafter.save_pretrained(folder / "drafter", **halved(drafter))
    file = folder / "drafter" / "model.safetensors"
    published = {
        name.removesuffix(".weight") if "codebook" in name else name: tensor
        for name, tensor in load_file(file).items()
    }
    save_file(published, file, metadata={"format": "pt"})
    for extra in folder.glob("*/generation_config.json"):
        extra.unlink()


@torch.no_grad()
def tensors(target, drafter, prompt: list[int]) -> dict[str, torch.Tensor]:
    """One drafter forward from token SPLIT, and the selector on it: its greedy path, then a drawn
    path with the candidates and the probabilities that it was drawn with."""
    ids = torch.tensor([prompt])
    states = target(ids, output_hidden_states=True).hidden_states
    features = extract_context_feature(states, drafter.target_layer_ids)
    hidden = block_hidden(drafter, target, features, ids, SPLIT)
    given = (hidden, ids[:, SPLIT], target.lm_head)
    best, _, _ = drafter.propose(*given, 0.0)
    drawn, candidates, q = drafter.propose(*given, TEMPERATURE)
    found = {
        "prompt_ids": ids, "draft_hidden": hidden, "best": best, "drawn": drawn,
        "draft_logits": drafter.compute_logits(hidden, target.lm_head),
        "candidates": candidates, "q": q,
    }  # fmt: skip
    return {name: tensor[0].contiguous() for name, tensor in found.items()}


def twin(model):
    """The model with rounding-sized noise on all weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.mul_(1 + NOISE * torch.randn_like(tensor))
    return other


def generate(target, drafter, case: dict) -> tuple[list[int], list[int]]:
    prompt = case["prompt_ids"]
    with exact_rollback(target):
        result = dflash_generate(
            drafter, target, torch.tensor([prompt]), case["max_new_tokens"], case["stop_token_ids"],
            temperature=0, block_size=case["block_size"], return_stats=True,
        )  # fmt: skip
    return result.output_ids[0, len(prompt) :].tolist(), result.acceptance_lengths


def make_cases(target, drafter, texts: torch.Tensor, narrow: bool, draw: random.Random) -> list:
    """Runs that no rounding changes: learnt prompts and parts of them, stops, a narrower block."""
    others, cases = (twin(target), twin(drafter)), []
    for _ in range(4 * CASES):
        number = len(cases)
        if number == CASES:
            break
        prompt = draw.choice(texts).tolist()[: draw.randint(1, PROMPT) if number == 1 else PROMPT]
        case = {
            "prompt_ids": prompt, "max_new_tokens": draw.randint(NEW // 2, NEW),
            "stop_token_ids": None, "block_size": drafter.block_size,
        }  # fmt: skip
        if number == 2:
            case["stop_token_ids"] = [draw.choice(generate(target, drafter, case)[0][3:])]
        if number == 3 and narrow and drafter.block_size > 2:
            case["block_size"] = draw.randrange(2, drafter.block_size)
        found = generate(target, drafter, case)
        if found != generate(*others, case):
            continue
        if number == 0:  # transformers' own decoding is slow: one case a pair
            alone, gap = plain_run(target, prompt, case["max_new_tokens"], None)
            if gap <= CLOSE:
                continue
            assert alone == found[0], f"{alone} without a drafter, {found[0]} with it"
        case["output_ids"], case["acceptance_lengths"] = found
        cases.append(case)
    return cases


def make_pair(seed: int, index: int, folder: Path) -> dict | None:
    """One pair, trained, saved, read back and recorded; None if the draw does not serve."""
    family = list(FAMILIES)[index % len(FAMILIES)]
    torch.manual_seed(seed)
    random.seed(seed)
    draw = random.Random(seed)
    target = random_target(family, index < 8, draw)
    drafter = untrained_drafter(target, index % 3 != 0, draw)
    texts = greedy_texts(target, draw)
    train(drafter, target, texts)
    save(target, drafter, folder)
    target = type(target).from_pretrained(folder / "target", dtype=torch.float32).eval()
    read = DFlash2DraftModel.from_pretrained(folder / "drafter", dtype=torch.float32).eval()
    for (name, a), b in zip(drafter.named_parameters(), read.parameters(), strict=True):
        assert torch.equal(a, b), f"{name} changed in saving"
    recorded = tensors(target, read, texts[0].tolist()[:PROMPT])
    noisy = tensors(twin(target), twin(read), texts[0].tolist()[:PROMPT])
    same = all(torch.equal(recorded[x], noisy[x]) for x in ("best", "prompt_ids"))
    same &= torch.equal(recorded["candidates"].sort().values, noisy["candidates"].sort().values)
    narrow = index % 7 == 0  # each width is one more to compile
    cases = make_cases(target, read, texts, narrow, draw)
    if not same or len(cases) < CASES:
        return None
    save_file(recorded, folder / "tensors.safetensors")
    versions = {name: version(name) for name in ("torch", "transformers", "dflash")}
    return {"seed": seed, "versions": versions, "family": family, "cases": cases}


def make_pair_somehow(index: int, seed: str, out: Path) -> tuple[list[int], bool]:
    """A worker's task: draws pairs until one serves, and writes its record, one case a line.

    Gives the acceptance lengths, and whether the selector changed a draft of the recorded forward.
    """
    torch.set_num_threads(1)
    disable_progress_bar()
    folder = out / f"pair{index:02d}"
    for attempt in range(ATTEMPTS):
        derived = random.Random(f"{seed}/{index}/{attempt}").randrange(2**31)
        record = make_pair(derived, index, folder)
        if record is not None:
            head = {name: value for name, value in record.items() if name != "cases"}
            lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in record["cases"])
            text = json.dumps(head)[:-1] + ', "cases": [\n' + lines + "\n]}\n"
            (folder / "record.json").write_text(text)
            lengths = [n for case in record["cases"] for n in case["acceptance_lengths"]]
            recorded = load_file(folder / "tensors.safetensors")
            unary = recorded["draft_logits"].argmax(-1)
            return lengths, not torch.equal(unary, recorded["best"])
    raise SystemExit(f"{folder.name}: {ATTEMPTS} draws, none usable (seed {seed})")


def make_set(seed: str, out: Path, chosen: list[int]) -> str:
    """All pairs, two at a time; raises AssertionError if the tests could not rely on the set."""
    for old in out.glob("pair[0-9][0-9]"):
        shutil.rmtree(old)
    # Forked: what is imported takes longer than several pairs.
    with ProcessPoolExecutor(2, get_context("fork")) as workers:
        tasks = [workers.submit(make_pair_somehow, i, seed, out) for i in chosen]
        made = [task.result() for task in tasks]
    count, lengths = len(chosen), [n for pair, _ in made for n in pair]
    mean, changed = sum(lengths) / len(lengths), sum(by for _, by in made) / count
    assert mean > 1.3 and max(lengths) >= 5, f"mean acceptance {mean:.2f}, at most {max(lengths)}"
    assert changed >= 0.3, f"a selector that changes drafts of {changed:.2f} of the pairs"
    configs = [json.loads(x.read_text()) for x in out.glob("pair*/drafter/config.json")]
    windows = [c["sliding_window"] for c in configs if c["use_sliding_window"]]
    two_sided = sum(c.get("is_causal") is False for c in configs)
    assert min(windows) < 20 and two_sided, f"windows {windows}, {two_sided} sights to both sides"
    return (
        f"{count} pairs, {len(lengths)} steps, mean acceptance {mean:.2f}, lengths "
        f"{sorted(set(lengths))}, the selector changes drafts of {changed:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--count", type=int, default=30, help="pairs")
    which.add_argument(
        "--turn", type=int, help="one of each family that make_cases.py --turn leaves out"
    )
    options = parser.parse_args()
    chosen = list(range(options.count))
    if options.turn is not None:
        others = families_of_turn(options.turn + 1)
        chosen = [i for i, family in enumerate(FAMILIES) if family in others]
    torch.set_num_threads(1)
    began = time.perf_counter()
    for attempt in range(SET_ATTEMPTS):
        seed = f"{options.seed}/{attempt}" if attempt else str(options.seed)
        try:
            summary = make_set(seed, options.out, chosen)
            break
        except AssertionError as reason:
            print(f"  set {attempt} dropped: {reason}", flush=True)
    else:
        raise SystemExit(f"{SET_ATTEMPTS} sets, none usable (seed {options.seed})")
    size = sum(f.stat().st_size for f in options.out.rglob("*") if f.is_file())
    took = time.perf_counter() - began
    print(f"seed {options.seed}: {summary}, {size / 1e6:.2f} MB, {took:.0f} s")


if __name__ == "__main__":
    main()
