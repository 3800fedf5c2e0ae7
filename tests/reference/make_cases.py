"""Make random checkpoint pairs and record what the DFlash reference does with them.

Needs torch, transformers and dflash, not JAX:
`python make_cases.py --seed N --out DIR [--small | --windows | --turn N]`.
README.md beside this file describes what is written.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import torch
from dflash.model import extract_context_feature
from reference_cases import (
    LENGTHS,
    LONG_LENGTHS,
    LONGEST_RUN,
    MIN_GAP,
    WIDEST,
    Writer,
    nudged,
    random_prompt,
    twin,
)
from reference_pairs import (
    FULL_SHAPES,
    HYBRIDS,
    SMALL_SHAPES,
    WINDOW_SHAPES,
    Pair,
    Shape,
    Unusable,
    embedding_scale,
    full_of_turn,
    load,
    random_target,
    round_weights,
    save,
    untrained_drafter,
)
from reference_training import Lessons, greedy_texts, train
from safetensors.torch import save_file
from transformers.utils.logging import disable_progress_bar

ATTEMPTS = 40  # draws of one pair: most that fail are cheap
SET_ATTEMPTS = 2
# One entry a case: how it ends, its block ("own" or "less" than the drafter's), its prompt's kind.
# "narrow": its last block has less room than a block, and padding it visibly gives other lengths.
PLAN = [
    ("long", "own", "known"),
    ("limit", "less", "fresh"),
    ("stop", "own", "known"),
    ("stops", "own", "known"),
    ("stop-at-prefill", "own", "known"),
    ("tiny", "own", "known"),
    ("unused-stops", "own", "known"),
    ("stop-at-edge", "own", "known"),
    ("limit", "own", "lengthy"),
    ("narrow", "own", "known"),
    ("limit-at-edge", "own", "known"),
    ("narrow", "own", "known"),
    ("stop", "own", "lengthy"),
    ("stops", "less", "known"),
    ("stop", "own", "known"),
    ("limit", "less", "known"),
    ("tiny", "own", "known"),
    ("stops", "own", "known"),
]
FULL_PLAN = 11
SETS = {"full": FULL_SHAPES, "small": SMALL_SHAPES, "windows": WINDOW_SHAPES}
# Long texts, in which a window's end and a ring's seam pass.
WINDOW_PLAN = [
    ("long", "own", "lengthy"),
    ("stop", "own", "known"),
    ("limit", "own", "lengthy"),
    ("stops", "less", "known"),
    ("narrow", "own", "known"),
    ("limit", "less", "lengthy"),
    ("stop", "own", "lengthy"),
    ("long", "own", "known"),
    ("stop", "own", "known"),
    ("limit", "own", "known"),
]


@torch.inference_mode()
def tensors(pair: Pair, prompt: list[int], split: int = 12) -> dict[str, torch.Tensor]:
    """Logits and features over a prompt, and one drafter forward from its token `split`."""
    target, drafter, width = pair.target, pair.drafter, pair.drafter.block_size
    out = target(torch.tensor([prompt]), output_hidden_states=True)
    features = extract_context_feature(out.hidden_states, drafter.target_layer_ids)
    block = torch.tensor([[prompt[split]] + [drafter.mask_token_id] * (width - 1)])
    hidden = drafter(
        target_hidden=features[:, :split],
        noise_embedding=target.get_input_embeddings().weight[block] * embedding_scale(drafter),
        position_ids=torch.arange(split + width)[None],
    )
    return {
        "prompt_ids": torch.tensor(prompt),
        "logits": out.logits[0].contiguous(),
        "features": features[0].contiguous(),
        "draft_hidden": hidden[0].contiguous(),
        "draft_logits": drafter.compute_logits(hidden, target.lm_head)[0].contiguous(),
    }


@torch.inference_mode()
def check_calm(target: torch.nn.Module, prompt: list[int]) -> None:
    """Before a drafter is trained for it: rounding hardly moves the target's logits."""
    ids = torch.tensor([prompt])
    moved = (target(ids).logits - nudged(target)(ids).logits).abs().max().item()
    if moved > MIN_GAP / 4:
        raise Unusable(f"too chaotic: rounding moves the target's logits by {moved:.1e}")


def make_pair(shape: Shape, folder: Path, seed: int, longs: list[int], small: bool) -> dict:
    """One pair, trained, saved and recorded; raises Unusable when the draw does not serve."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    target = random_target(shape, draw)
    if shape.small_files:
        round_weights(target)
    drafter = untrained_drafter(shape, target, draw)
    mask, vocab = drafter.mask_token_id, target.config.get_text_config().vocab_size
    # Each length; what a drafter learns by heart is most of a pair's time.
    lengths = LENGTHS + (2 * LENGTHS if small else draw.sample(LENGTHS, 4)) + 2 * longs
    pool = [random_prompt(vocab, mask, length, draw) for length in lengths]
    probe = random_prompt(vocab, mask, 20, draw)
    check_calm(target, probe)
    texts = greedy_texts(target, pool, LONGEST_RUN + WIDEST)
    train(Lessons(drafter, target, texts, pool), goal=1 + shape.learnable * (shape.block - 1))
    if shape.small_files:
        round_weights(drafter)
    save(shape, target, drafter, folder)
    pair = load(shape, folder)
    saved = tensors(pair, probe)
    for name, tensor in tensors(Pair(shape, target, drafter), probe).items():
        # Experts read back lie elsewhere in memory, and are summed in another order.
        moved = (tensor - saved[name]).abs().max().item()
        if moved > MIN_GAP / 40:
            raise Unusable(f"saving moves {name} by {moved:.1e}")
    save_file(saved, folder / "tensors.safetensors")
    off = tensors(twin(pair), probe)
    noise = max((off[n] - saved[n]).abs().max().item() for n in ("logits", "draft_logits"))
    if noise > MIN_GAP / 4:
        raise Unusable(f"too chaotic: rounding moves logits by {noise:.1e}")
    writer = Writer(pair, pool, draw)
    plan = WINDOW_PLAN if shape.windows else PLAN if small else PLAN[:FULL_PLAN]
    for ending, size, kind in plan:
        writer.make(ending, size, kind)
    floor = 1.4 if shape.windows else min(2.2, 1 + 0.15 * shape.block)
    check_pair(writer.cases, small, longs, floor)
    print(
        f"  {folder.name}: {shape.family} block {shape.block}, {len(writer.cases)} cases, "
        f"{writer.refused} refused, mean acceptance {tau(writer.cases):.2f}, noise {noise:.1e}",
        flush=True,
    )
    return {
        "seed": seed,
        "versions": {name: version(name) for name in ("torch", "transformers", "dflash")},
        "family": shape.family,
        "cases": writer.cases,
    }


def fill_gaps(shape: Shape, folder: Path, record: dict, missing: set[int]) -> None:
    """Add cases to a pair with the widest blocks until no acceptance length is missing."""
    pair = load(shape, folder)
    torch.manual_seed(record["seed"])
    prompts = [case["prompt_ids"] for case in record["cases"]]
    writer = Writer(pair, prompts, random.Random(record["seed"]))
    writer.cases = record["cases"]
    writer.fill(missing)


def tau(cases: list[dict]) -> float:
    lengths = [n for case in cases for n in case["acceptance_lengths"]]
    return sum(lengths) / max(1, len(lengths))


def inside(cases: list[dict], ended_by: str) -> int:
    return sum(case["end_inside_block"] and case["ended_by"] == ended_by for case in cases)


def check_pair(cases: list[dict], small: bool, longs: list[int], floor: float) -> None:
    prompt_lengths = {len(case["prompt_ids"]) for case in cases}
    wanted = {"cases": len(cases) >= (14 if small else 8),
              "stops inside": inside(cases, "stop") >= (4 if small else 2),
              "limits inside": inside(cases, "limit") >= (4 if small else 2),
              "accepted tokens": tau(cases) > floor,
              "tokens": len({t for case in cases for t in case["output_ids"]}) >= 20,
              "long prompts": prompt_lengths >= set(longs)}  # fmt: skip
    failed = [name for name, held in wanted.items() if not held]
    if failed:
        raise Unusable(f"too few: {', '.join(failed)}")


def write_record(record: dict, path: Path) -> None:
    """JSON with one case a line: small, and a diff still shows which case moved."""
    head = {name: value for name, value in record.items() if name != "cases"}
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in record["cases"])
    path.write_text(json.dumps(head)[:-1] + ', "cases": [\n' + lines + "\n]}\n")


def make_pair_somehow(index: int, place: int, seed: str, out: Path, kind: str) -> dict:
    """A worker's task: draw pairs until one serves. `place` is the pair's in what is made."""
    torch.set_num_threads(1)
    disable_progress_bar()
    shape, small = SETS[kind][index], kind == "small"
    small &= shape.family not in HYBRIDS  # these are slow
    longs = [LONG_LENGTHS[(place + 3 * k) % 6] for k in range(2 if small else 1)]
    folder = out / f"pair{index:02d}"
    for attempt in range(ATTEMPTS):
        derived = random.Random(f"{seed}/{index}/{attempt}").randrange(2**31)
        try:
            return make_pair(shape, folder, derived, longs, small)
        except Unusable as reason:
            print(f"  {folder.name}: draw {attempt} dropped: {reason}", flush=True)
    raise SystemExit(f"{folder.name}: {ATTEMPTS} draws, none usable (seed {seed})")


def make_set(seed: str, out: Path, kind: str, turn: int | None) -> list[dict]:
    """All pairs, two at a time: one thread each wastes less than two threads on small matrices."""
    shapes = SETS[kind]
    chosen = list(range(len(shapes))) if turn is None else full_of_turn(turn)
    slowest_first = sorted(enumerate(chosen), key=lambda x: -shapes[x[1]].block)
    # Forked: what is imported takes longer than a pair.
    with ProcessPoolExecutor(2, get_context("fork")) as workers:
        tasks = {
            index: workers.submit(make_pair_somehow, index, place, seed, out, kind)
            for place, index in slowest_first
        }
        records = {index: tasks[index].result() for index in chosen}
    for index, record in records.items():
        cases = [case for other in records.values() for case in other["cases"]]
        missing = set(range(1, WIDEST + 1)) - {n for c in cases for n in c["acceptance_lengths"]}
        if missing and shapes[index].block == WIDEST and kind != "windows":
            fill_gaps(shapes[index], out / f"pair{index:02d}", record, missing)
    for index, record in records.items():
        write_record(record, out / f"pair{index:02d}" / "record.json")
    return [case for record in records.values() for case in record["cases"]]


def check_set(cases: list[dict], kind: str, turn: int | None) -> str:
    """What the tests rely on; raises AssertionError with the reason, else gives a summary."""
    if kind == "windows":
        return f"{len(cases)} generations, mean acceptance {tau(cases):.2f}"
    small = kind == "small"
    lengths = [n for case in cases for n in case["acceptance_lengths"]]
    widths = {case["block_size"] for case in cases}
    prompts = {len(case["prompt_ids"]) for case in cases}
    stops, limits = inside(cases, "stop"), inside(cases, "limit")
    narrow = sum("narrow" in case["name"] for case in cases)
    assert len(cases) >= (40 if small else 48), f"only {len(cases)} generations"
    assert tau(cases) > 2, f"mean acceptance length {tau(cases):.2f}"
    assert set(lengths) == set(range(1, WIDEST + 1)), f"acceptance lengths {sorted(set(lengths))}"
    assert stops >= 10 and limits >= 10, f"{stops} stops and {limits} limits inside a block"
    assert narrow >= (3 if turn is None else 1), f"{narrow} cases that notice visible padding"
    assert widths - {2**n for n in range(6)}, f"block widths {sorted(widths)}"
    assert prompts >= {*LENGTHS, *LONG_LENGTHS}, f"prompt lengths {sorted(prompts)}"
    assert not all(case["end_inside_block"] for case in cases)
    return (
        f"{len(cases)} generations, {len(lengths)} steps, mean acceptance {tau(cases):.2f}, "
        f"{stops} stops and {limits} limits inside a block, {narrow} narrow, "
        f"widths {sorted(widths)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    sets = parser.add_mutually_exclusive_group()
    sets.add_argument("--small", action="store_true", help="the pairs of cases/")
    sets.add_argument("--windows", action="store_true", help="the pairs of window_cases/")
    sets.add_argument(
        "--turn", type=int, help="half of the families, by turns; make_dflash2_cases.py: the others"
    )
    options = parser.parse_args()
    kind = "small" if options.small else "windows" if options.windows else "full"
    torch.set_num_threads(1)
    disable_progress_bar()
    began = time.perf_counter()
    for attempt in range(SET_ATTEMPTS):
        for old in options.out.glob("pair[0-9][0-9]"):
            shutil.rmtree(old)
        cases = make_set(f"{options.seed}/{attempt}", options.out, kind, options.turn)
        try:
            summary = check_set(cases, kind, options.turn)
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
