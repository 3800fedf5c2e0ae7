"""Cases for `make_cases.py`: watched runs of the reference, and endings looked for in them."""

from __future__ import annotations

import copy
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import dflash.model
import torch
from dflash.model import dflash_generate
from reference_hybrid import exact_rollback
from reference_pairs import Pair, embedding_scale
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

dflash.model._cuda_time = time.perf_counter  # return_stats asks for CUDA's clock

WIDEST = 16
WIDTHS = [2, 3, 5, 7, 8, 11, 16]
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33]
LONG_LENGTHS = [127, 128, 129, 255, 256, 257]
MIN_GAP = 2e-3  # between the two best logits, for logits of order 1 to 10
ROUTED = 1e-5  # relative noise under which a router must choose as without it
LONGEST_RUN = 80
PROMPTS, ENDINGS = 8, 6  # tried for a case; of each prompt


@dataclass(frozen=True)
class Step:
    """One draft-and-verify step: new tokens before it, block width, room, what it committed."""

    done: int
    width: int
    room: int
    agreed: int  # accepted drafts + 1, before the stop token or the limit cut it
    produced: int


@dataclass
class Run:
    new: list[int]
    steps: list[Step]
    gap: float  # smallest gap that could change this run, relative to MIN_GAP

    @property
    def lengths(self) -> list[int]:
        return [step.produced for step in self.steps]


def _gap(logits: torch.Tensor) -> float:
    if not len(logits):
        return float("inf")
    best = logits.topk(2, dim=-1).values
    scale = (logits.abs().amax(-1) / 10).clamp_min(1)
    return ((best[:, 0] - best[:, 1]) / scale).min().item() / MIN_GAP


def _chosen(router: nn.Module, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The experts of each row, ascending: what a router gives besides numbers."""
    (ids,) = (part for part in router.forward(x, *others) if not part.is_floating_point())
    return ids.sort(-1).values


@contextmanager
def watched_routers(target: PreTrainedModel) -> Iterator[list[bool]]:
    """Yields a list that gets, at each call of a router, whether noise of rounding's size, ten
    times as large, changes an expert: logits may then be another by much, whatever their gaps."""
    found, noise = [], torch.Generator().manual_seed(0)

    def watch(router: nn.Module, given: tuple, _: object) -> None:
        x, *others = given
        want = _chosen(router, x, *others)
        for _ in range(8):
            nudge = 1 + ROUTED * torch.randn(x.shape, generator=noise)
            found.append(not torch.equal(_chosen(router, x * nudge, *others), want))

    routers = [module for module in target.modules() if "Router" in type(module).__name__]
    hooks = [router.register_forward_hook(watch) for router in routers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def reference_run(pair: Pair, prompt: list[int], new: int, stops: list | None, block: int) -> Run:
    """`dflash_generate`, watched: its own numbers, and how close any deciding argmax was."""
    verified: list[torch.Tensor] = []
    drafted: list[torch.Tensor] = []
    plain = type(pair.drafter).compute_logits

    def watch_draft(hidden: torch.Tensor, head: torch.nn.Module) -> torch.Tensor:
        drafted.append(plain(pair.drafter, hidden, head))
        return drafted[-1]

    hook = pair.target.register_forward_hook(lambda *a: verified.append(a[-1].logits[0]))
    pair.drafter.compute_logits = watch_draft
    try:
        with exact_rollback(pair.target), watched_routers(pair.target) as ties:
            result = dflash_generate(
                pair.drafter, pair.target, torch.tensor([prompt]), new, stops,
                temperature=0, block_size=block, return_stats=True,
            )  # fmt: skip
    finally:
        hook.remove()
        del pair.drafter.compute_logits
    gap, steps, done = 0.0 if any(ties) else _gap(verified[0][-1:]), [], 1
    for produced, draft, verify in zip(
        result.acceptance_lengths, drafted, verified[1:], strict=True
    ):
        agree = draft[0].argmax(-1) == verify[:-1].argmax(-1)
        agreed = int(agree.cumprod(0).sum()) + 1
        # Drafts after the first disagreement decide nothing; that one itself does.
        gap = min(gap, _gap(draft[0, :agreed]), _gap(verify[:agreed]))
        steps.append(Step(done, len(verify), new - done + 1, agreed, produced))
        done += produced
    tokens = result.output_ids[0, len(prompt) :].tolist()
    assert len(tokens) == done
    return Run(tokens, steps, gap)


def plain_run(
    target: PreTrainedModel, prompt: list[int], new: int, stops: list | None
) -> tuple[list[int], float]:
    """transformers' own greedy decoding, and how close any of its argmaxes was."""
    how = GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=stops, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    ids = torch.tensor([prompt])
    result = target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
    return result.sequences[0, len(prompt) :].tolist(), _gap(torch.cat(result.logits))


@torch.no_grad()
def nudged(model: nn.Module, relative: float = 1e-6) -> nn.Module:
    """The model with rounding-sized noise on all weights and RoPE frequencies."""
    other = copy.deepcopy(model)
    for tensor in other.parameters():
        tensor.mul_(1 + relative * torch.randn_like(tensor))
    for name, tensor in other.named_buffers():
        if name.endswith("inv_freq"):
            tensor.mul_(1 + 0.2 * relative * torch.randn_like(tensor))
    return other


def twin(pair: Pair) -> Pair:
    """The pair with such noise on both models."""
    return Pair(pair.shape, nudged(pair.target), nudged(pair.drafter))


@contextmanager
def visible_padding(pair: Pair, block: int) -> Iterator[None]:
    """Break the drafter as an engine would that pads a narrow last block and forgets to mask."""
    drafter, plain = pair.drafter, type(pair.drafter).forward
    embedding = pair.target.get_input_embeddings().weight[drafter.mask_token_id]
    embedding = embedding * embedding_scale(drafter)

    def forward(*, noise_embedding: torch.Tensor, position_ids: torch.Tensor, **rest: object):
        width = noise_embedding.shape[1]
        more = embedding.expand(1, block - width, -1)
        at = position_ids[:, -1:] + 1 + torch.arange(block - width)
        return plain(
            drafter,
            noise_embedding=torch.cat([noise_embedding, more], 1),
            position_ids=torch.cat([position_ids, at], 1),
            **rest,
        )[:, :width]

    drafter.forward = forward
    try:
        yield
    finally:
        del drafter.forward


class Writer:
    """Collects a pair's cases; refuses those that another order of summing could change."""

    def __init__(self, pair: Pair, pool: list[list[int]], draw: random.Random) -> None:
        self.pair, self.twin, self.pool, self.draw = pair, twin(pair), pool, draw
        self.cases: list[dict] = []
        self.refused = 0
        own = pair.shape.block
        self.less = draw.choice([width for width in WIDTHS if width < own] or [own])

    def prompts(self, kind: str) -> Iterator[list[int]]:
        """Candidate prompts, the wanted kind first; `known` ones are in the drafter's lessons."""
        if kind == "fresh":
            for length in self.draw.sample(LENGTHS, len(LENGTHS)):
                yield random_prompt(self.pair.vocab, self.pair.drafter.mask_token_id, length,
                                    self.draw)  # fmt: skip
        used = Counter(len(case["prompt_ids"]) for case in self.cases)
        rest = self.draw.sample(self.pool, len(self.pool))
        if kind == "lengthy":  # few, and each length must turn up: try them again, shorter
            rest += 2 * [prompt for prompt in rest if len(prompt) > 100]
        # Lengths that have been used least come first, so that a set uses all of them.
        yield from sorted(rest, key=lambda p: ((len(p) > 100) != (kind == "lengthy"), used[len(p)]))

    def add(self, name: str, prompt: list[int], new: int, stops: list | None, block: int) -> bool:
        run = reference_run(self.pair, prompt, new, stops, block)
        other = reference_run(self.twin, prompt, new, stops, block)
        hit = stops is not None and run.new[-1] in stops
        # Stopped in the very token that the limit allows last: two right answers; leave it out.
        twice = hit and len(run.new) == new
        if run.gap < 1 or other.new != run.new or other.lengths != run.lengths or twice:
            self.refused += 1
            return False
        if len(self.cases) % 4 == 0:  # transformers' own decoding is slow
            alone, _ = plain_run(self.pair.target, prompt, new, stops)
            assert alone == run.new, f"{alone} without a drafter, {run.new} with it"
        last = run.steps[-1] if run.steps else None
        if last is None:
            inside = False
        elif hit:
            inside = last.produced < min(last.agreed, last.room - 1)
        else:
            inside = last.width < block or last.produced < last.agreed
        case = {
            "name": f"{len(self.cases):02d}-{name}-p{len(prompt)}-b{block}",
            "prompt_ids": prompt,
            "max_new_tokens": new,
            "stop_token_ids": stops,
            "block_size": block,
            "output_ids": run.new,
            "acceptance_lengths": run.lengths,
            "ended_by": "stop" if hit else "limit",
            "end_inside_block": inside,
        }
        if any({**old, "name": ""} == {**case, "name": ""} for old in self.cases):
            return False
        self.cases.append(case)
        return True

    def make(self, ending: str, size: str, kind: str) -> None:
        # Some pairs have no such ending, or none that rounding spares: the search is short.
        block = self.pair.shape.block if size == "own" else self.less
        for attempt, prompt in enumerate(islice(self.prompts(kind), PROMPTS)):
            shrink = 0.9**attempt  # a shorter run has fewer close calls
            new = {
                "tiny": self.draw.choice([1, 2, 3]),
                "long": max(20, int(LONGEST_RUN * shrink)),
            }.get(ending, max(12, int(self.draw.randrange(30, 64) * shrink)))
            if attempt < len(LENGTHS) and kind == "fresh":
                new = self.draw.randrange(12, 25)  # hardly anything is accepted: keep it short
            for limit, stops in islice(self.endings(ending, prompt, new, block), ENDINGS):
                if self.add(ending, prompt, limit, stops, block):
                    return

    def endings(
        self, ending: str, prompt: list[int], new: int, block: int
    ) -> Iterator[tuple[int, list[int] | None]]:
        """Limits and stop sets that give this ending, found in a run without stops."""
        if ending in ("tiny", "long", "limit"):
            yield new, None
            return
        if ending == "narrow":
            for limit in self.draw.sample(range(4, 40), 2):
                run = reference_run(self.pair, prompt, limit, None, block)
                with visible_padding(self.pair, block):
                    broken = reference_run(self.pair, prompt, limit, None, block)
                if broken.lengths != run.lengths:
                    yield limit, None
            return
        run = reference_run(self.pair, prompt, new, None, block)
        unused = sorted(set(range(self.pair.vocab)) - set(run.new))
        if ending == "unused-stops":
            yield new, self.draw.sample(unused, 3)
        elif ending == "stop-at-prefill":
            yield new, self.draw.sample([run.new[0], *unused[:2]], 3)
        elif ending == "limit-at-edge":
            for step in run.steps:
                if step.agreed == step.width == block:
                    yield step.done + block, None
        else:
            yield from self.stops(ending, run, new)

    def stops(self, ending: str, run: Run, new: int) -> Iterator[tuple[int, list[int]]]:
        for step in self.draw.sample(run.steps, len(run.steps)):
            inside = range(step.done, step.done + step.produced - 1)
            for at in inside if ending != "stop-at-edge" else [step.done + step.produced - 1]:
                if run.new[at] in run.new[:at]:
                    continue
                # Others must not come earlier; ids that come later, or never, change nothing.
                later = sorted(set(range(self.pair.vocab)) - set(run.new[: at + 1]))
                more = self.draw.sample(later, 3) if ending == "stops" else []
                yield new, self.draw.sample([run.new[at], *more], 1 + len(more))

    def fill(self, missing: set[int]) -> None:
        """Cut long blocks short, by limit or stop, where an acceptance length is missing."""
        for prompt in self.pool:
            if not missing:
                return
            run = reference_run(self.pair, prompt, 60, None, WIDEST)
            for step in run.steps:
                for length in sorted(missing & set(range(1, step.produced + 1))):
                    at = step.done + length - 1
                    tries: list[tuple[int, list | None]] = [(at + 1, None)]
                    if length == step.produced:
                        tries = [(min(60, at + WIDEST + 2), None)]
                    elif run.new[at] not in run.new[:at]:
                        tries.append((60, [run.new[at]]))
                    for limit, stops in tries:
                        if length in missing and self.add("cut", prompt, limit, stops, WIDEST):
                            missing -= set(self.cases[-1]["acceptance_lengths"])


def random_prompt(vocab: int, mask: int, length: int, draw: random.Random) -> list[int]:
    return draw.choices([token for token in range(vocab) if token != mask], k=length)
