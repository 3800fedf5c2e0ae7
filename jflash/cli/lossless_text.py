"""Results of check-lossless as text: a line for each check, a table of all modes, the verdict."""

from typing import Any


def differences_of(result: dict[str, Any]) -> int:
    """All differences of one check: tokens, rows of logits, rows of K/V."""
    modes = [mode.items() for mode in result["modes"].values()]
    return sum(count for mode in modes for kind, count in mode if kind.startswith("differing"))


def progress_line(result: dict[str, Any]) -> str:
    return (
        f"{result['pair']}, batch {result['batch']}: {result['tokens']} tokens in "
        f"{result['seconds']:.0f} s, {result['compile_seconds']:.0f} of them compiling; "
        f"{differences_of(result)} differences"
    )


def fault_line(fault: dict[str, Any]) -> str:
    caught = "caught" if fault["with"]["differences"] else "NOT CAUGHT"
    return (
        f"planted fault ({fault['splits']} KV splits by length, capacity {fault['capacity']}, "
        f"contexts of {' and '.join(map(str, fault['prompt_tokens']))} tokens, {fault['pair']}): "
        f"{caught}, {fault['with']['differences']} differences with it, "
        f"{fault['without']['differences']} without"
    )


def width_1_line(summary: dict[str, Any]) -> str:
    s = summary
    line = (
        f"width 1 against width W ({s['pair']}, batch {s['batch']}): "
        f"{s['sequences_that_differ']} of {s['sequences']} sequences and "
        f"{s['share_of_tokens_that_differ']:.1%} of {s['tokens']} tokens differ"
    )
    if not s["sequences_that_differ"]:
        return line
    before, wide, narrow = s["equal_tokens_before"], s["nats_at_width_w"], s["nats_at_width_1"]
    return (
        f"{line}; {s['first_differences_per_1000_tokens']:.2f} first differences in 1000 tokens, "
        f"after {before['least']} … {before['most']} (median {before['median']:g}); "
        f"nats between the two tokens, median and most: at width W {wide['median']:.4f}, "
        f"{wide['most']:.4f}, at width 1 {narrow['median']:.4f}, {narrow['most']:.4f}"
    )


def print_verdict(report: dict[str, Any]) -> None:
    """Prints where the check ran, and its verdict."""
    versions = report["versions"]
    print(
        f"{report['device']}, jax {versions['jax']}, driver {versions['driver'] or 'none'}, "
        f"{report['dtype']}, seed {report['seed']}, {report['date']}"
    )
    for line in report["failures"]:
        print(f"FAILED: {line}")
    if report["failures"]:
        return
    if "law" in report:
        tokens = sum(law["tokens"] for law in report["law"])
        print(f"LOSSLESS: {tokens} tokens, all the bits of plain decoding at width 1 and batch 1")
    if "checks" in report:
        print(f"LOSSLESS: {report['tokens']} tokens of the oracles, every mode the same bits")
    if "ops" in report:
        rows = sum(op["compared_rows"] for each in report["ops"] for op in each["ops"])
        print(f"LOSSLESS: {rows} rows of single operations, the same bits among 1 to 512 rows")


def print_oracle(report: dict[str, Any]) -> None:
    """Prints the table of all modes, and the counts."""
    print(
        f"\n{'pair':<10} {'batch':>5} {'mode':<22} {'runs':>4} {'tokens':>8} {'logits rows':>11} "
        f"{'K/V rows':>9} {'τ':>6} {'differing: tokens':>18} {'logits':>7} {'K/V':>7}"
    )
    for result in report["checks"]:
        for name, mode in result["modes"].items():
            kv = mode["differing_target_kv_rows"] + mode["differing_context_kv_rows"]
            print(
                f"{result['pair']:<10} {result['batch']:>5} {name:<22} {mode['runs']:>4} "
                f"{mode['tokens']:>8} {mode['logits_rows']:>11} {mode['kv_rows']:>9} "
                f"{mode['logits_rows'] / max(1, mode['steps']):>6.2f} "
                f"{mode['differing_tokens']:>18} {mode['differing_logits_rows']:>7} {kv:>7}"
            )
    print("K/V rows: positions, each compared in every layer of the target, and of the drafter "
          "where it is the oracle's")  # fmt: skip
    print(f"replayed steps that committed 1, 2, … tokens: {report['replay_histogram']}")
    print(f"distinct tokens in the outputs: {report['distinct_tokens']}")
    not_top = sum(result["tokens_not_top"] for result in report["checks"])
    print(f"tokens of the oracles that are not the largest of their logits: {not_top}")
    print(fault_line(report["planted_fault"]))
    for summary in report["width_1"]:
        print(width_1_line(summary))
    backends = ", ".join(f"{op} {backend}" for op, backend in report["backends"].items())
    print(f"{backends}, {report['seconds']:.0f} s")
