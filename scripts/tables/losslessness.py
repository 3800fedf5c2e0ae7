"""Tables of losslessness: one program with and without drafts, and width 1 beside width 16."""

from typing import Any

from tables.cells import Result, table, with_key
from tables.evidence import evaluated


def lossless(results: list[Result]) -> str:
    """The counts of check_lossless.py, a run a line: all modes compared with the oracle's texts."""
    cases = checks_of(results)
    rows = []
    for case in cases:
        pairs = dict.fromkeys(check["pair"] for check in case["checks"])
        batches = sorted({check["batch"] for check in case["checks"]})
        fault = case["planted_fault"]
        caught = fault["with"]["differences"] and not fault["without"]["differences"]
        rows.append([
            ", ".join(pairs), ", ".join(map(str, batches)), f"{case['tokens']:,}",
            f"{compared_tokens([case]):,}", case["differences"],
            f"{min(case['replay_histogram']):,}", "caught" if caught else "NOT CAUGHT",
            f"{case['seconds'] / 60:.1f}",
        ])  # fmt: skip
    head = [
        *("pair", "batches", "tokens of the oracle", "tokens compared", "differences, in any mode"),
        *("steps replayed of each length, at least", "planted fault", "minutes"),
    ]
    return table(head, rows, cases)


def law(results: list[Result]) -> str:
    """What check_lossless.py counted against plain decoding at width 1 and batch 1."""
    cases: list[dict[str, Any]] = [
        r.content | {"file": r.name}
        for r in results
        if "law" in r.content and r.content["device"] != "cpu"
    ]
    rows = []
    pairs = [(run, pair) for run in cases for pair in run["law"]]
    for run, one in pairs:
        layers = f", {run['layers']} layers" if run.get("layers") else ""
        layers += f", drafters in {run['drafter_dtype']}" if run.get("drafter_dtype") else ""
        sums = {
            kind: sum(each[f"compared_{kind}"] for each in one["compared"])
            for kind in ("tokens", "logits_rows", "kv_rows")
        }
        caught = sum(fault["caught"] for fault in one["faults"])
        rows.append([
            one["pair"] + layers, f"{one['tokens']:,}", f"{len(one['compared'])}",
            " / ".join(f"{count:,}" for count in sums.values()), f"{one['differences']}",
            f"{caught} of {len(one['faults'])}", f"{one['seconds'] / 60:.1f}",
        ])  # fmt: skip
    head = [
        *("pair", "tokens of plain decoding", "other ways to decode them"),
        *("compared: tokens / rows of logits / of K and V", "differences", "faults caught"),
        "minutes",
    ]
    return table(head, rows, cases)


def law_of_families(results: list[Result]) -> str:
    """Where the law of each family of targets was checked: families.json names a test and a run."""
    content = {f"benchmarks/{result.name}": result.content for result in results}
    ran = content.get("benchmarks/cpu-long-tests.json", {}).get("tests", {})
    rows = []
    for family in (row for case in with_key(results, "families") for row in case["families"]):
        run = content.get(family.get("law on a GPU"), {})
        own = [
            f"{pair['differences']} differ: {pair['pair']}, {run['device']}"
            for pair in run.get("law", [])
            if pair["pair"] in family["shapes"]
        ]
        passed = ran.get(family.get("law"), {}).get("outcome") == "passed"
        rows.append([family["family"], "0 differ" if passed else "–", "; ".join(own) or "–"])
    head = ["family", "a small pair on a CPU, float32", "published widths on a GPU, bfloat16"]
    return table(head, rows, [])


def width_1(results: list[Result]) -> str:
    """How often the texts of the pair's width and of width 1 part, and by how many nats."""
    cases = [case for case in checks_of(results) if any(case["width_1"])]
    rows = [
        [
            w["pair"], w["batch"], f"{w['sequences_that_differ']} of {w['sequences']}",
            f"{w['first_differences_per_1000_tokens']:.1f}",
            " / ".join(f"{w['equal_tokens_before'][k]:g}" for k in ("median", "most")),
            *(
                " / ".join(f"{w[where][k]:.2f}" for k in ("median", "most"))
                for where in ("nats_at_width_w", "nats_at_width_1")
            ),
        ]
        for case in cases
        for w in case["width_1"]
    ]  # fmt: skip
    head = [
        *("pair", "batch", "sequences that part", "first differences in 1,000 tokens"),
        *("equal tokens before, median / most", "nats at width 16, median / most"),
        "nats at width 1, median / most",
    ]
    return table(head, rows, cases)


def right_logits(results: list[Result]) -> str:
    """The distances of check_logits.py from float32: of our pass, of XLA's and of a fault's."""
    cases = with_key(results, "right_logits")
    rows = [
        [
            f"{case['shape']}, {case['layers']} layers{_on(case)}, "
            f"embedding {case['embedding_scale']:g}",
            f"{r['batch']} / {r['width']}", f"{r['experts_reached']:.0f}",
            *(f"{r[n]['mean_nats']:.1e} / {r[n]['most_nats']:.1e}" for n in ("ours", "xla")),
            " / ".join(f"{r[n]['largest_difference']:.3f}" for n in ("ours", "xla")),
            " / ".join(f"{r[n]['same_best']:.1%}" for n in ("ours", "xla")),
            _of_fault(r["fault"]),
            *(
                f"{d['mean_nats']:.1e} / {d['most_nats']:.1e}, {d['largest_difference']:.3f}, "
                f"{d['same_best']:.1%}"
                for d in [r.get("against", {}).get("ours")] if d
            ),
        ]
        for case in cases
        for r in case["right_logits"]
    ]  # fmt: skip
    head = [
        *("shape", "batch / width", "experts reached"),
        *("nats, mean / most: ours", "XLA", "largest difference of a logit, ours / XLA"),
        *("same best token, ours / XLA", "nats with the fault, mean / most"),
        "ours at this width against width 1: nats, largest difference, same best",
    ]
    return table(head, rows, cases)


def _on(case: dict[str, Any]) -> str:
    devices = case.get("tensor_parallel", 1)
    return f" on {devices} devices" if devices > 1 else ""


def _of_fault(fault: dict[str, Any]) -> str:
    """Nats, and the columns that a dense target's fault is in where it took more than usual."""
    of = "" if fault.get("one_in", 64) == 64 else f", one column in {fault['one_in']}"
    return f"{fault['mean_nats']:.1e} / {fault['most_nats']:.1e}{of}"


def plain_text(results: list[Result]) -> str:
    """Greedy answers of a real pair that equal plain decoding's to the last token."""
    rows, cases = [], evaluated(results, "baseline")
    for case in cases:
        settings, plain = case["settings"], case["baseline"]
        equal = f"{plain['identical_outputs']} of {plain['answers']}"
        rows.append([settings["dataset"], settings["batch"], equal])
    return table(["data set", "batch", "answers equal to plain decoding's"], rows, cases)


def checks_of(results: list[Result]) -> list[dict[str, Any]]:
    """The runs of check_lossless.py, the longest first."""
    return sorted(with_key(results, "planted_fault"), key=lambda case: -case["tokens"])


def compared_tokens(cases: list[dict[str, Any]]) -> int:
    """Tokens that drafters and replays gave and that were compared with the oracle's."""
    checks = [check for case in cases for check in case["checks"]]
    return sum(mode["tokens"] for check in checks for mode in check["modes"].values())
