"""Tables of evidence: data sets decoded, drafters trained, families of targets."""

import shlex
from typing import Any

from tables.cells import Result, table, with_key

TINY_PROMPTS = {  # of evaluate_tiny_pair.py
    "eval": "{} problems of known templates, new numbers",
    "held_out": "{} problems of held-out templates",
    "gsm8k": "first {} GSM8K test questions",
}
CELLS = ("target", "drafter v1", "window", "DFlash 2", "parity tested", "run on a GPU")


def evaluations(results: list[Result]) -> str:
    """Data sets decoded by a real pair: acceptance, speed, and whose tokens they are."""
    cases = evaluated(results)
    rows = []
    for case in sorted(cases, key=evaluation_order):
        s, plain, same = case["settings"], case.get("baseline"), case.get("same_as")
        ended, rest = case["acceptance"]["ended"], case["acceptance"]["limit_or_looping"]
        ratios = (plain["speed_up"], plain["speed_up_with_prefill"]) if plain else ()
        rows.append([
            s["dataset"], evaluation_way(s), s["batch"],
            f"{ended['tau_pooled']:.2f} ({ended['prompts']})",
            f"{rest['tau_pooled']:.2f} ({rest['prompts']})",
            f"{case['speed']['tokens_per_second']:,.0f}",
            " / ".join(f"{ratio:.2f} ×" for ratio in ratios),
            f"{same['identical_outputs']} of {same['answers']}" if same else "",
        ])  # fmt: skip
    head = [
        *("data set", "decoding", "batch", "τ, ended (answers)", "τ, looping or cut (answers)"),
        *("tokens/s", "speed-up / with prefill", "same tokens as the trained drafter"),
    ]
    return table(head, rows, cases)


def evaluated(results: list[Result], *keys: str) -> list[dict[str, Any]]:
    """The summaries of data sets that have these keys."""
    return [case["environment"] | case for case in with_key(results, "acceptance", *keys)]


def evaluation_way(settings: dict[str, Any]) -> str:
    """How an evaluation decoded: the drafter if it is not the trained one, and the draws."""
    if settings["oracle"]:
        return "oracle: no draft accepted"
    if str(settings["drafter"]).startswith("random"):
        return "random drafter"
    if settings["temperature"] == 0:
        return "greedy"
    rule = "one-hot drafts" if settings["draft_rule"] == "greedy" else "drafts drawn from q"
    return f"temperature {settings['temperature']:g}, {rule}"


def evaluation_order(case: dict[str, Any]) -> tuple[Any, ...]:
    s = case["settings"]
    return s["dataset"], s["temperature"], evaluation_way(s) != "greedy", s["batch"], case["file"]


def trainings(results: list[Result]) -> str:
    """Drafters trained for one target, by their options of train_drafter.py: τ of each."""
    cases = with_key(results, "trainings")
    rows = []
    for row in (row for case in cases for row in case["trainings"]):
        words = iter(shlex.split(row["options"]))
        o = dict(zip(words, words, strict=True))
        recipe = [o.pop("--loss", "ce"), o.pop("--position-weights", "decay")]
        size = f"{o.pop('--num-layers')} × {o.pop('--intermediate-size')}"
        steps = " × ".join(o.pop(name) for name in ("--steps", "--batch", "--anchors"))
        rate = o.pop("--learning-rate")
        recipe += [f"{name.removeprefix('--')} {value}" for name, value in o.items()]
        last = row["held_out"][-1]
        of = f", {row['prompts']} prompt" if "prompts" in row else ""
        rows.append([
            ", ".join(recipe), size, f"{row['answers']:,}{of}", steps, rate, row["gpus"],
            f"{last['tau']:.2f} / {last['tau_ended']:.2f}",
            *(tau_of(row["evaluations"].get(name)) for name in ("gsm8k_temperature_1", "mt_bench")),
        ])  # fmt: skip
    head = [
        *("loss, weights of positions", "layers × MLP", "answers", "steps × rows × blocks"),
        *("learning rate", "GPUs", "held-out τ, all / ended", "GSM8K, temperature 1", "MT-Bench"),
    ]
    return table(head, rows, cases)


def tau_of(evaluation: dict[str, Any] | None) -> str:
    """τ of the answers that ended, and their number."""
    ended = evaluation and evaluation["ended"]
    return f"{ended['tau']:.2f} ({ended['answers']})" if ended else ""


def tiny_pair(results: list[Result]) -> str:
    """The embedded pair by evaluate_tiny_pair.py: right results, and acceptance by ending."""
    found = _tiny_pairs(results)
    rows = []
    for case in found:
        for name, what in TINY_PROMPTS.items():
            if name not in case:
                continue
            of, ended, rest = case[name], case[name]["ended"], case[name]["limit_or_looping"]
            kinds, steps = of["endings"], of.get("correct_by_steps", {})
            rows.append([
                what.format(sum(kinds.values())), _where(case),
                f"{100 * of['correct']:.1f} %" if steps else "",
                " / ".join(f"{100 * part:.0f}" for _, part in sorted(steps.items())),
                " / ".join(_tau(ended[mean]) for mean in ("tau_pooled", "tau_mean_of_means")),
                " / ".join(str(kinds[kind]) for kind in ("ended", "limit", "looping")),
                _tau(rest["tau_pooled"]),
            ])  # fmt: skip
    head = [
        *("prompts", "on", "right", "% right by steps 1 / 2 / …", "τ, ended: pooled / of means"),
        *("ended / cut / looping", "τ, the rest"),
    ]
    return table(head, rows, found)


def tiny_pair_speed(results: list[Result]) -> str:
    """One prompt at a time with the drafter and at width 1, in turns: medians over prompts."""
    found = [case for case in _tiny_pairs(results) if "width_1" in case]
    rows = [
        [
            _where(case), f"{speed['drafter_tokens_per_second']:,.0f}",
            f"{speed['width_1_tokens_per_second']:,.0f}", f"{speed['speed_up']:.2f} ×",
            f"{speed['same_tokens']} of {speed['prompts']}",
        ]
        for case in found
        for speed in [case["width_1"]]
    ]  # fmt: skip
    head = ["on", "tokens/s", "at width 1", "speed-up, median of prompts", "same tokens"]
    return table(head, rows, found)


def _tiny_pairs(results: list[Result]) -> list[dict[str, Any]]:
    return [case for case in with_key(results, "eval", "held_out") if "ended" in case["eval"]]


def _tau(value: float | None) -> str:
    """Nothing where there is no step."""
    return "" if value is None else f"{value:.2f}"


def _where(case: dict[str, Any]) -> str:
    return f"{case['device'].split(',')[0]}, {case['dtype']}"


def families(results: list[Result]) -> str:
    """The support of each family of targets: ✓ where families.json names a test or result."""
    listed = [row for case in with_key(results, "families") for row in case["families"]]
    rows = [[row["family"], *("✓" if row[name] else "–" for name in CELLS)] for row in listed]
    return table(["family", *CELLS], rows, [])
