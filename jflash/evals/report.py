"""The summary of an evaluation as text."""

from typing import Any


def table(summary: dict[str, Any]) -> str:
    acceptance, speed = summary["acceptance"], summary["speed"]
    lines = [f"{summary['answers']} answers"]
    right = summary["accuracy"]
    if right is not None:
        low, high = right["interval_95"]
        rules = ", ".join(
            f"{rule} {counts['correct']} of {counts['judged']}"
            for rule, counts in right["by_rule"].items()
        )
        lines.append(
            f"right            {right['share']:.1%} ({right['correct']} of {right['judged']}), "
            f"95 % Wilson interval {low:.1%} … {high:.1%}; by rule: {rules}"
        )
    groups = {"all": "all", "ended": "ended", "cut or looping": "limit_or_looping"}
    for name, key in groups.items():
        group = acceptance[key]
        lines.append(
            f"τ, {name:<14} {number(group['tau_pooled'])} pooled, "
            f"{number(group['tau_mean_of_means'])} mean of prompts, {group['prompts']} answers, "
            f"{group['new_tokens']} tokens"
        )
    lines.append("steps that committed 1, 2, … tokens  " + _list(acceptance["all"]["histogram"]))
    positions = summary["acceptance_by_position"]
    if positions:
        for name, key in (
            ("draft accepted when reached ", "accepted_when_tried"),
            ("draft accepted of all steps ", "accepted_of_all_steps"),
        ):
            lines.append(name + _list([number(row[key]) for row in positions]))
    lines.append("finish reasons   " + _counts(summary["finish_reasons"]))
    lines.append("endings          " + _counts(acceptance["endings"]))
    lines.append(_speed("speed, all", speed))
    if "speed_ended" in summary:
        lines.append(_speed("speed, ended", summary["speed_ended"]))
    if "baseline" in summary:
        lines += _baseline(summary["baseline"])
    if "same_as" in summary:
        same = summary["same_as"]
        count = f"{same['identical_outputs']} of {same['answers']} outputs"
        lines += [f"as {same['folder']}: {count}", *_differences(same, "there", "other_token")]
    return "\n".join(lines)


def _baseline(baseline: dict[str, Any]) -> list[str]:
    ended = baseline.get("both_ended")  # only at batch 1
    lines = [
        _speed("plain decoding", baseline["speed"]),
        _speed_up("all", baseline),
        *([_speed_up("ended", ended)] if ended else []),
        f"identical        {baseline['identical_outputs']} of {baseline['answers']} outputs",
    ]
    return lines + _differences(baseline, "plain decoding", "plain_token")


def _differences(comparison: dict[str, Any], other: str, token: str) -> list[str]:
    return [
        f"  problem {d['index']}, turn {d['turn']}: at token {d['position']} "
        f"{d['token']}, {other} {d[token]}"
        for d in comparison["first_differences"][:5]
    ]


def _speed(name: str, speed: dict[str, Any]) -> str:
    spent = speed["seconds"]
    return (
        f"{name:<16} {number(speed['tokens_per_second'])} tokens/s in decoding, "
        f"{number(speed['tokens_per_second_with_prefill'])} with prefill (decode "
        f"{spent['decode']:.1f} s, prefill {spent['prefill']:.1f} s, "
        f"compile {spent['compile']:.1f} s)"
    )


def _speed_up(name: str, pairs: dict[str, Any]) -> str:
    return (
        f"speed-up, {name:<6} {number(pairs['speed_up'])} in decoding, "
        f"{number(pairs['speed_up_with_prefill'])} with prefill, {pairs['answers']} answers"
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _list(values: list[Any]) -> str:
    return " ".join(str(value) for value in values)


def number(value: float | None) -> str:
    """Two decimals below 100, none from there; a dash for None."""
    return "–" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"
