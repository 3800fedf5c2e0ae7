"""The summary of an evaluation: accuracy, acceptance, speed, comparison with plain decoding.

It reads only the records on disk, so that a resumed run gives the summary of an unbroken one.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jflash.acceptance import by_ending, ending
from jflash.evals.record import PARTS
from jflash.generate import Generation, Seconds

Record = dict[str, Any]

Z = 1.959964  # of a 95 % interval
DECILES = 10
SHOWN_DIFFERENCES = 20


def generation(record: Record) -> Generation:
    """The generation that a record was made of."""
    names = ("prompt_tokens", "token_ids", "acceptance_lengths", "finish_reason")
    return Generation(**{n: record[n] for n in names}, seconds=Seconds(**record["seconds"]))


def summarise(
    answers: Sequence[Record], width: int, baseline: Sequence[Record] | None = None, *,
    batch_size: int,
) -> dict[str, Any]:  # fmt: skip
    """The summary of one run's records; `baseline` are the same prompts decoded plainly.

    At batch 1 no other answer shares an answer's seconds, so the speed of those that a stop token
    ended is there too.
    """
    answers = sorted(answers, key=_order)
    generations = [generation(record) for record in answers]
    summary: dict[str, Any] = {
        "answers": len(answers),
        "accuracy": accuracy([r["check"] for r in answers if r["check"] is not None]),
        "acceptance": by_ending(generations, width),
        "acceptance_by_position": by_position(generations, width),
        "acceptance_by_progress": by_progress(generations),
        "finish_reasons": dict(sorted(Counter(g.finish_reason for g in generations).items())),
        "speed": speed(generations),
    }
    if batch_size == 1:
        summary["speed_ended"] = speed([g for g in generations if ending(g) == "ended"])
    endings = summary["acceptance"]["endings"]
    unfinished = endings["limit"] + endings["looping"]
    summary["share_cut_or_looping"] = unfinished / len(answers) if answers else None
    if baseline is not None:
        summary["baseline"] = compare(answers, sorted(baseline, key=_order), batch_size)
    return summary


def accuracy(checks: Sequence[Record]) -> dict[str, Any] | None:
    """The share of right answers with Wilson's interval; None if nothing was judged."""
    if not checks:
        return None
    right, count = sum(c["correct"] for c in checks), len(checks)
    rules = Counter(c["rule"] for c in checks)
    correct = Counter(c["rule"] for c in checks if c["correct"])
    return {
        "correct": right,
        "judged": count,
        "share": right / count,
        "interval_95": wilson(right, count),
        "interval": "Wilson score, 95 %",
        "by_rule": {
            rule: {"judged": judged, "correct": correct[rule]}
            for rule, judged in sorted(rules.items())
        },
    }


def wilson(right: int, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share, at 95 %."""
    share, square = right / count, Z * Z
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    half *= Z / (1 + square / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def by_position(generations: Sequence[Generation], width: int) -> list[dict[str, Any]]:
    """How often draft 1 … width - 1 was accepted: given that all before it were, and of all steps.

    A stop token or the limit may cut the last step of an answer; what it would have accepted
    after the cut is unknown and does not count.
    """
    tried, accepted = Counter[int](), Counter[int]()
    steps = sum(len(g.acceptance_lengths) for g in generations)
    for g in generations:
        for left, length in enumerate(reversed(g.acceptance_lengths)):
            accepted.update(range(1, length))
            tried.update(range(1, length + 1 if left else length))
    return [
        {
            "position": p,
            "tried": tried[p],
            "accepted_when_tried": accepted[p] / tried[p] if tried[p] else None,
            "accepted_of_all_steps": accepted[p] / steps if steps else None,
        }
        for p in range(1, width)
    ]


def by_progress(generations: Sequence[Generation]) -> list[dict[str, Any]]:
    """Tokens a step in every tenth of the answers, by where a step begins."""
    tenths: list[list[int]] = [[] for _ in range(DECILES)]
    for g in generations:
        total, begin = len(g.token_ids), 1  # the prefill's token comes first
        for length in g.acceptance_lengths:
            tenths[min(DECILES - 1, DECILES * begin // total)].append(length)
            begin += length
    return [
        {"from": i / DECILES, "steps": len(t), "tau": sum(t) / len(t) if t else None}
        for i, t in enumerate(tenths)
    ]


def speed(generations: Sequence[Generation]) -> dict[str, Any]:
    """Tokens of the steps over the seconds of the steps; prefill and compilation apart."""
    tokens = sum(sum(g.acceptance_lengths) for g in generations)
    spent = {part: sum(getattr(g.seconds, part) for g in generations) for part in PARTS}
    both = spent["prefill"] + spent["decode"]
    return {
        "tokens_of_steps": tokens,
        "seconds": spent,
        "tokens_per_second": tokens / spent["decode"] if spent["decode"] else None,
        "tokens_per_second_with_prefill": tokens / both if both else None,
    }


def compare(
    answers: Sequence[Record], baseline: Sequence[Record], batch_size: int
) -> dict[str, Any]:
    """Plain decoding of the same prompts: its speed, and where its tokens part from ours.

    At batch 1 there is also the speed over prompts where both answers ended.
    """
    plain = {_order(record): generation(record) for record in baseline}
    ours = [record for record in answers if _order(record) in plain]
    pairs = [(generation(record), plain[_order(record)]) for record in ours]
    ended = [pair for pair in pairs if all(ending(g) == "ended" for g in pair)]
    return {
        "what": "plain decoding: the target at width 1, the same prompts and engine",
        **_speed_up(pairs),
        **({"both_ended": _speed_up(ended)} if batch_size == 1 else {}),
        "endings": dict(sorted(Counter(map(ending, plain.values())).items())),
        **differences(ours, baseline, "plain_token"),
        "accuracy": accuracy([r["check"] for r in baseline if r["check"] is not None]),
    }


def _speed_up(pairs: Sequence[tuple[Generation, Generation]]) -> dict[str, Any]:
    """The speed of the second of each pair, and how much faster the first ones are."""
    ours, other = speed([ours for ours, _ in pairs]), speed([other for _, other in pairs])

    def ratio(name: str) -> float | None:
        return ours[name] / other[name] if ours[name] and other[name] else None

    return {
        "answers": len(pairs),
        "speed": other,
        "speed_up": ratio("tokens_per_second"),
        "speed_up_with_prefill": ratio("tokens_per_second_with_prefill"),
    }


def differences(answers: Sequence[Record], others: Sequence[Record], name: str) -> Record:
    """How many answers have the same tokens in `others`, which hold all their prompts.

    For the first few that differ: the position, and both tokens there (the other run's under
    `name`).
    """
    theirs = {_order(record): record for record in others}
    different = [d for r in answers if (d := _difference(r, theirs[_order(r)], name)) is not None]
    return {
        "identical_outputs": len(answers) - len(different),
        "first_differences": different[:SHOWN_DIFFERENCES],
    }


def _order(record: Record) -> tuple[int, int]:
    return record["index"], record["turn"]


def _difference(record: Record, other: Record, name: str) -> Record | None:
    """Where two answers part: the first position, counted from 0, and both tokens there."""
    ours, theirs = record["token_ids"], other["token_ids"]
    if ours == theirs:
        return None
    same = zip(ours, theirs, strict=False)
    place = next((i for i, (a, b) in enumerate(same) if a != b), min(len(ours), len(theirs)))
    return {
        "index": record["index"],
        "turn": record["turn"],
        "position": place,
        "token": ours[place] if place < len(ours) else None,
        name: theirs[place] if place < len(theirs) else None,
    }
