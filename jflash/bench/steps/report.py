"""A benchmark's results as text and as one JSON object. Measures nothing, reads no clock."""

from typing import Any

from jflash.records.kernels import BACKENDS

GIB = 2**30
PARTS = {"plain": "plain", "verify": "verify", "draft": "draft", "step": "whole step"}
# The same in all cases of a run; what gathers hangs on the number of devices.
OF_ALL = tuple(name for name in BACKENDS if name != "gather_backend")
SHARED = ("device", "versions", "xla_flags", "date", *OF_ALL)


def add_speed(case: dict[str, Any], acceptance: float | None) -> None:
    """Adds the tokens a second that the step would give at an assumed acceptance."""
    if acceptance is None:
        return
    case["assumed_speed"] = {
        "how": f"at an assumed acceptance of {acceptance:g} tokens a step, not measured",
        "assumed_acceptance_length": acceptance,
        "assumed_tokens_per_second": 1e3 * case["batch"] * acceptance / case["step"]["ms"],
    }


def add_beside(case: dict[str, Any], other: dict[str, Any]) -> None:
    """Adds the step of another shape, timed right after this one, and the ratio to it."""
    step = {"shape": other["shape"], "step": other["step"]}
    case["beside"] = step | {"times_as_long": case["step"]["ms"] / other["step"]["ms"]}


def add_peak(memory: dict[str, Any]) -> None:
    """Adds the peak over weights and caches, where a device reports one."""
    if memory.get("peak_bytes"):
        held = memory["weights_bytes"] + memory["caches_bytes"]
        memory["peak_over_weights_and_caches"] = memory["peak_bytes"] / held - 1


def add_ratios(reference: dict[str, Any], case: dict[str, Any]) -> None:
    """Adds how many times longer the reference takes than jflash's case at batch 1."""
    reference["times_as_long"] = {
        "plain": reference["plain"]["ms_per_step"] / case["plain"]["ms"],
        "step": reference["dflash"]["ms_per_step"] / case["step"]["ms"],
    }
    measured = case.get("measured_speed")
    if measured:
        theirs = 1e3 / reference["dflash"]["ms_per_token"]
        reference["tokens_per_second"] = theirs
        reference["plain_tokens_per_second"] = 1e3 / reference["plain"]["ms_per_token"]
        reference["jflash_times_as_many_tokens"] = measured["tokens_per_second"] / theirs


def collect(cases: list[dict[str, Any]], reference: dict[str, Any] | None) -> dict[str, Any]:
    """The JSON of a run: what all cases share once, then the cases, then the reference."""
    result = {name: cases[0][name] for name in SHARED}
    result["cases"] = [{k: v for k, v in c.items() if k not in SHARED} for c in cases]
    return result | ({} if reference is None else {"reference": reference})


def device_line(case: dict[str, Any]) -> str:
    floors = case["floors"]
    return (
        f"{case['device']}: reads {floors['bytes_per_second'] / 1e12:.3f} TB/s, multiplies "
        f"{floors['operations_per_second'] / 1e12:.3g} TFLOP/s in {case['dtype']}"
    )


def case_text(case: dict[str, Any]) -> str:
    """One case as a table with its memory, compile and speed lines."""
    backends = ", ".join(f"{name.removesuffix('_backend')}: {case[name]}" for name in BACKENDS)
    lines = [
        f"{case['shape'] or case['weights']}, {case['dtype']}, batch {case['batch']}, block "
        f"{case['block_size']}, context {case['context']:.0f} of {case['capacity']}; {backends}",
        f"  {'':<10} {'ms':>8} {'GB':>8} {'TFLOP':>8} {'floor ms':>9} {'of floor':>9}",
    ]
    timed = [(label, case[name]) for name, label in PARTS.items() if name in case]
    widths = [(row["block_size"], row) for row in case["widths"]]
    narrow = [(f"width {width}", row) for width, row in widths if width != case["block_size"]]
    for label, part in timed + narrow:
        lines.append(
            f"  {label:<10} {part['ms']:8.3f} {part['bytes'] / 1e9:8.3f} "
            f"{part['operations'] / 1e12:8.4f} {part['floor_ms']:9.3f} "
            f"{part['share_of_floor']:9.1%}"
        )
    lines += [
        f"  prefill of {row['tokens']} tokens by {' and '.join(map(str, row['chunks']))}: "
        f"{row['ms']:.1f} ms, "
        f"{row['tokens_per_second']:.0f} tokens/s"
        for row in case.get("prefill", ())
    ]
    if "draft" in case:
        draft = case["draft"]
        lines.append(
            f"  draft takes {draft['share_of_step']:.1%} of the step "
            f"(by itself, without the context K/V, {draft['alone_ms']:.3f} ms)"
        )
    if "beside" in case:
        other = case["beside"]
        ms, ratio = other["step"]["ms"], other["times_as_long"]
        lines.append(f"  beside {other['shape']}, {ms:.3f} ms a step: {ratio:.3f} × as long")
    read = [
        f"{label} {part['experts_read']:.1f}" for label, part in timed if "experts_read" in part
    ]
    if read:
        lines.append(f"  experts read, the mean of the layers: {', '.join(read)}")
    lines.append("  " + _memory_line(case["memory"]))
    compiled = case["compile_seconds"]
    warm = f", with a warm cache {compiled['warm_cache']:.1f} s" if "warm_cache" in compiled else ""
    lines.append(f"  compiled from nothing in {compiled['from_nothing']:.1f} s{warm}")
    lines.append("  " + _speed_line(case))
    return "\n".join(lines)


def reference_text(reference: dict[str, Any]) -> str:
    """The PyTorch code beside jflash, batch 1."""
    versions = ", ".join(f"{k} {v}" for k, v in reference["versions"].items())
    plain, step, ratio = reference["plain"], reference["dflash"], reference["times_as_long"]
    lines = [
        f"PyTorch reference ({versions}) on the same weights, batch 1, {reference['device']}",
        f"  plain      {plain['ms_per_step']:8.3f} ms a token: {ratio['plain']:.2f} × jflash's",
        f"  whole step {step['ms_per_step']:8.3f} ms: {ratio['step']:.2f} × jflash's",
    ]
    if "tokens_per_second" in reference:
        lines.append(
            f"  measured: {reference['tokens_per_second']:.0f} tokens/s at τ "
            f"{step['mean_acceptance_length']:.2f}, plain "
            f"{reference['plain_tokens_per_second']:.0f}; jflash decodes "
            f"{reference['jflash_times_as_many_tokens']:.2f} × as many"
        )
    return "\n".join(lines)


def _memory_line(memory: dict[str, Any]) -> str:
    m = {name: value / GIB for name, value in memory.items() if value is not None}
    text = f"weights {m['weights_bytes']:.2f} GiB, caches {m['caches_bytes']:.2f} GiB"
    if "temporaries_bytes" in m:
        text += f", temporaries {m['temporaries_bytes']:.3f} GiB"
    if "peak_over_weights_and_caches" not in memory:
        return f"{text}; no peak was read"
    over = f"{memory['peak_over_weights_and_caches']:+.1%} over weights and caches"
    return f"{text}; peak {m['peak_bytes']:.2f} GiB, {over}"


def _speed_line(case: dict[str, Any]) -> str:
    """Tokens a second, if an acceptance was measured or assumed."""
    if "measured_speed" in case:
        m = case["measured_speed"]
        return (
            f"measured: {m['tokens_per_second']:.0f} tokens/s at τ "
            f"{m['mean_acceptance_length']:.2f}, plain {m['plain_tokens_per_second']:.0f}: "
            f"{m['speed_up']:.2f} ×, over {m['prompts']} prompts, "
            f"of which {m['endings'].get('looping', 0)} end in a loop"
        )
    if "assumed_speed" in case:
        assumed = case["assumed_speed"]
        return f"{assumed['assumed_tokens_per_second']:.0f} tokens/s {assumed['how']}"
    return "no tokens/s: random weights accept nothing of meaning; --acceptance assumes a number"
