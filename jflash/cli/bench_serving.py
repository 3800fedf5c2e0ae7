"""bench-serving: the figures of the engine and of the server."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from jflash.bench.serving.cases import Case, measured, random_pair
from jflash.bench.serving.recording import of_mean, read_recording, recorded
from jflash.cli.command import Options, require
from jflash.cli.options.pair import shared_note
from jflash.compiled.shape import LARGE_CHUNK
from jflash.evals.datasets import load_problems
from jflash.io import configure_pair, encode_prompt, load_weights
from jflash.records.decoding import Decoding
from jflash.records.kernels import AUTO
from jflash.serving.batch import check_batch
from jflash.serving.calls.layout import steps_of_call
from jflash.serving.calls.pass_sizes import engine_chunk
from jflash.serving.engine import PREFILL_BETWEEN
from jflash.system.device import describe_device
from jflash.system.lines import whole_file
from jflash.system.locks import in_turn

BATCHES = (1, 8, 32, 64)
TEXTS = 8  # beside a long prompt


def run(args: Options) -> Iterator[dict[str, Any]]:
    """Yields the result after each row."""
    with in_turn(args.in_turn) as wait:
        result: dict[str, Any] = describe_device() | {"serving": []}
        if args.record is not None:
            yield result | record(args)
            return
        rows = of_shape if args.target is None else of_pair
        for row in rows(args, result, wait):
            print(row_text(row), flush=True)
            result["serving"].append(row)
            yield result


def of_shape(
    args: Options, result: dict[str, Any], wait: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    recording = read_recording(args.replay)
    sizes = args.drafter_dtype, most_slots(args), (args.tensor_parallel, args.experts_over)
    pair = random_pair(args.shape, recording, args.dtype, *sizes)
    result |= {"shape": args.shape, "backends": pair.models.kernels._asdict()}
    result |= {"block_size": pair.models.block_size, "replayed_tau": recording.tokens_a_step}
    result |= shared_note(args) | dtype_note(args)
    steps = args.steps_per_call or (steps_of_call(pair.models),)
    others = args.auto_batch or args.first_token or args.long_prompt
    batches = args.batch or (() if others else BATCHES)
    cases = [
        case
        for count in steps
        for case in (
            *(Case(n, count, burst=n in batches, first=n in args.first_token)
              for n in sorted({*batches, *args.first_token})),
            *(Case(n, count, AUTO) for n in args.auto_batch),
            *(Case(TEXTS + 1, count, burst=False, long=n) for n in args.long_prompt),
        )
    ]  # fmt: skip
    chunk = args.prefill_chunk or engine_chunk(pair.models, LARGE_CHUNK)
    yield from measured(
        pair, [case._replace(chunk=chunk) for case in cases], wait,
        requests=args.requests, texts=args.texts, repeats=args.repeats, probes=args.probes,
        between=args.prefill_between or PREFILL_BETWEEN,
    )  # fmt: skip


def of_pair(
    args: Options, result: dict[str, Any], wait: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    if args.clients is not None:
        require("httpx", "starlette", "uvicorn", "prometheus_client", "msgspec", "llguidance")
    from jflash.bench.serving.pair import Load, answered, with_rows

    pair, asked = pair_and_questions(args)
    steps = args.steps_per_call or (steps_of_call(pair.models),)
    result |= {"target": str(args.target).rsplit("/", 1)[-1], "questions": len(asked.prompts)}
    result |= {"backends": pair.models.kernels._asdict(), "block_size": pair.models.block_size}
    result |= shared_note(args) | dtype_note(args)
    batches = args.batch or (() if args.auto_batch or args.beside_form else BATCHES)
    if args.beside_form:
        require("llguidance")
        from jflash.bench.serving.beside_form import beside_form

        sizes = args.beside_form, args.max_new_tokens, steps[0], args.repeats
        yield from beside_form(pair, asked, *sizes, wait)
    for rows, sizes in ((None, batches), (AUTO, args.auto_batch)):
        load = Load(sizes, args.max_new_tokens, steps, args.repeats, args.clients)
        if sizes:
            yield from answered(with_rows(pair, rows), asked, load, wait)


def most_slots(args: Options) -> int:
    """The slots of the largest engine, for which a rounded drafter's weights lie."""
    named = *args.batch, *args.auto_batch, *args.first_token, *args.beside_form
    return max(named, default=TEXTS + 1 if args.long_prompt else max(BATCHES))


def dtype_note(args: Options) -> dict[str, Any]:
    """What a result says of a drafter whose products are rounded."""
    return {"drafter_dtype": args.drafter_dtype} if args.drafter_dtype else {}


def pair_and_questions(args: Options) -> tuple[Any, Any]:
    from jflash.bench.serving.pair import Questions

    files = configure_pair(
        args.target, args.drafter, dtype=args.dtype,
        drafter_dtype=args.drafter_dtype, batch=most_slots(args),
        tensor_parallel=args.tensor_parallel, experts_over=args.experts_over,
    )  # fmt: skip
    tokenizer = files.target.tokenizer()
    stops = tuple(files.target.stop_ids(tokenizer))
    problems = load_problems("gsm8k", args.gsm8k, limit=args.questions)
    texts = [problem.turns[0] for problem in problems]
    prompts = [encode_prompt(tokenizer, text) for text in texts]
    decoding = Decoding(max_new_tokens=args.max_new_tokens, stop_token_ids=stops)
    check_batch(files.models, prompts, decoding, most_slots(args))
    for steps in args.steps_per_call or ():
        steps_of_call(files.models, steps)  # refuses more than a text can take
    return load_weights(files), Questions(texts, prompts, stops, tokenizer)


def record(args: Options) -> dict[str, Any]:
    """Writes the recording, and returns what it holds."""
    pair, asked = pair_and_questions(args)
    decoding = Decoding(max_new_tokens=args.max_new_tokens, stop_token_ids=asked.stops)
    answers = recorded(pair, asked.prompts, decoding)
    kept = of_mean(answers, args.tau)
    steps = [step for answer in kept for step in answer]
    holds = {
        "pair": f"{str(args.target).rsplit('/', 1)[-1]}, GSM8K: the answers of most tokens a step",
        "answers": f"{len(kept)} of {len(answers)}",
        "tau": 1 + sum(step[0] for step in steps) / len(steps),
    }
    with whole_file(args.record, overwrite=False) as write:
        made = describe_device() | holds | {"steps": steps}
        write(json.dumps(made, separators=(",", ":")))
    print(f"{args.record}: {len(steps)} steps of {holds['answers']} answers, τ {holds['tau']:.2f}")
    return holds


def row_text(row: dict[str, Any]) -> str:
    name = f"{row['what']}, batch {row['batch']}, {row['steps_per_call']} steps a call"
    if row["what"] == "few texts":
        name += f", {row['requests']} at once"
    if row["what"] == "long prompt":
        alone, beside = (row[key]["most_ms"] for key in ("alone", "beside"))
        return (
            f"{name}: {row['prompt_tokens']} tokens beside {row['texts']} texts: their longest gap "
            f"{alone:.1f} ms alone, {beside:.1f} beside it, a stall of {row['stall_ms']:.1f}; its "
            f"first token after {row['first_token_ms']:.0f} ms"
        )
    if row["what"] == "first token":
        empty, known, beside = (row[key]["p50_ms"] for key in ("empty", "known", "beside"))
        return f"{name}: p50 {empty:.1f} ms, {known:.1f} known, {beside:.1f} beside others"
    if row["what"] == "beside a form":
        alone = row["beside_plain"]
        return (
            f"{name}: {row['neighbours']} texts beside one in a form: "
            f"{row['tokens_per_second']:,.0f} tokens/s, {row['kept']:.1%} of "
            f"{alone['tokens_per_second']:,.0f} beside one more text; a round takes "
            f"{row['a_round']['round_ms']:.2f} and {alone['a_round']['round_ms']:.2f} ms; "
            f"{row['differ']} texts differ"
        )
    more = "" if row["rows"] is None else f", steps by rows {row['steps_by_rows']}"
    if "share" in row:
        more += f", {row['share']:.1%} of the engine's, clients' processes busy for at most "
        more += f"{row['clients_busy']:.1%}"
    if "steady" in row:
        more += f", {row['steady']['tokens_per_second']:,.0f} between its ends"
    busy = f"{row['device_busy_seen']:.1%} to {row['device_busy']:.1%}"
    return (
        f"{name}: {row['tokens_per_second']:,.0f} tokens/s, τ {row['tau']:.2f}, "
        f"device busy {busy}, prefill {row['prefill_share']:.1%}{more}\n"
        + "  a round: {round_ms:.2f} ms, {chunks:.2f} chunks, {calls:.2f} calls, device idle "
        "{idle_ms:.2f} ms, host {host_ms:.2f} ms, dispatch {dispatch_ms:.2f} ms".format(
            **row["a_round"]
        )
    )
