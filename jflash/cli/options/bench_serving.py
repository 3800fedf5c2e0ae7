"""Measure the engine and the server: tokens a second, first tokens, how busy the device is.

With --shape, random weights replay a recorded pair's acceptances (--replay), which gives speeds at
the sizes of a published model. With --target and --drafter, a real pair answers GSM8K's questions
through the engine, and with --clients over HTTP too. --record writes the recording of a real pair.
"""

from pathlib import Path

from jflash.bench.shapes import SHAPES, model_shape
from jflash.cli.command import Options, Parser
from jflash.cli.options.pair import FLOAT8, check_shared, shared_options
from jflash.cli.options.values import at_least_1, counts, option_name, refuse, refuse_unread
from jflash.system.lines import check_whole_file

KEPT = "kept there case by case, so that a run cut off keeps its cases"
SHORTEST = 1024  # tokens of a long prompt
TAU = 6.05  # tokens a step; that of the numbers to compare with
OF_PAIR = {"drafter": None, "gsm8k": None, "questions": 256, "max_new_tokens": 512}
OF_SHAPE = {"replay": None, "requests": (1,), "texts": ()}
NOT_RECORDED = {"clients": None, "beside_form": (), "steps_per_call": None, "repeats": 3}


def declare(parser: Parser) -> None:
    add = parser.add_argument
    add("--shape", help=f"random weights of a published shape: {', '.join(SHAPES)}")
    add("--replay", type=Path, metavar="FILE", help="a recording, for --shape")
    plain = "default 1,8,32,64, unless other cases of a shape are named"
    add("--batch", type=counts, default=(), metavar="1,8", help=plain)
    add("--auto-batch", type=counts, default=(), metavar="32", help="with rows that are chosen too")
    first = "times to the first token with so many slots: of an idle engine, and with one slot free"
    add("--first-token", type=counts, default=(), metavar="32", help=first)
    long = "how long a prompt of N random tokens keeps 8 texts waiting"
    add("--long-prompt", type=counts, default=(), metavar="N", help=long)
    add("--target", metavar="SOURCE", help="a real pair instead, as for generate")
    add("--drafter", metavar="SOURCE")
    add("--gsm8k", type=Path, metavar="FILE", help="records of GSM8K's test split, for a real pair")
    add("--questions", type=int, default=256, help="default 256; 24 at batch 1")
    add("--clients", type=int, metavar="N", help="the real pair over HTTP as well, N at once")
    beside = "the real pair's texts beside one by a JSON schema, in so many slots"
    add("--beside-form", type=counts, default=(), metavar="8,32", help=beside)
    add("--max-new-tokens", type=int, default=512, help="of an answer, default 512")
    add("--record", type=Path, metavar="FILE", help="write the real pair's recording, no more")
    add("--tau", type=float, default=TAU, help=f"tokens a step of the recording, default {TAU}")
    add("--dtype", choices=("float32", "bfloat16"), help="by default the device's")
    add("--drafter-dtype", choices=("float8",), default="", help=FLOAT8)
    add("--steps-per-call", type=counts, default=None, metavar="1,4", help="of the engine")
    add(
        "--requests",
        type=counts,
        default=(1,),
        metavar="4,16",
        help="of a shape, for each slot, in bursts of each number: default 1",
    )
    few = "of a shape, so many at once too, in engines of more slots"
    add("--texts", type=counts, default=(), metavar="1,4", help=few)
    add(
        "--prefill-chunk",
        type=int,
        metavar="N",
        help="of a shape's engine: tokens of a pass, by default as jflash serve has it",
    )
    add("--prefill-between", type=int, metavar="N", help="the same: tokens between two calls")
    shared_options(parser, "the pair")
    turn = "commands of one FILE compile at once, and are timed one after another"
    add("--in-turn", type=Path, metavar="FILE", help=turn)
    add("--repeats", type=int, default=3, help="the median counts, default 3")
    add("--probes", type=int, default=20, help="first tokens of each kind, default 20")


def check(args: Options) -> None:
    real = args.target is not None
    refuse(real == (args.shape is not None), "give either --shape or --target and --drafter")
    refuse(real and args.drafter is None, "--target without --drafter")
    refuse(real and args.gsm8k is None, "--target without --gsm8k: there is nothing to answer")
    refuse(not real and args.replay is None, "--shape without --replay: a recording")
    for name in ("record", "clients"):
        refuse(not real and getattr(args, name) is not None, f"--{name} without --target")
    refuse(not real and args.beside_form, "--beside-form without --target")
    refuse_unread(args, *((OF_SHAPE, "without --shape") if real else (OF_PAIR, "without --target")))
    if args.record is None:
        refuse_unread(args, {"tau": TAU}, "without --record")
    else:
        refuse_unread(args, NOT_RECORDED, "with --record, which writes a recording and no more")
    if not args.first_token:
        refuse_unread(args, {"probes": 20}, "without --first-token")
    for batch in args.beside_form:
        named = f"--beside-form {batch}"
        refuse(batch < 2, f"{named}: at least 2, one of which has the form")
        refuse(batch > args.questions, f"{named}: there are {args.questions} --questions")
    for name in ("first_token", "long_prompt", "prefill_chunk", "prefill_between"):
        refuse(real and getattr(args, name), f"{option_name(name)} without --shape")
    slots = max((*args.batch, *args.auto_batch), default=0)
    for count in args.texts:
        refuse(count >= slots, f"--texts {count}: no --batch or --auto-batch of more slots")
    if not real:
        places = min(config.max_position_embeddings for config in model_shape(args.shape))
        for tokens in args.long_prompt:
            named = f"--long-prompt {tokens}"
            refuse(tokens < SHORTEST, f"{named}: at least {SHORTEST}, so that texts have room")
            refuse(tokens >= places, f"{named}: {args.shape} has {places} positions")
    check_shared(args)
    if args.auto_batch and not real:
        read = model_shape(args.shape).drafter.reads_logits
        refuse(read, f"--auto-batch: {args.shape}'s drafter reads logits, which no recording has")
    at_least_1(args, "questions", "clients", "max_new_tokens", "repeats", "probes")
    at_least_1(args, "prefill_chunk", "prefill_between")
    refuse(not args.tau > 1, f"--tau {args.tau}: above 1")
    if args.record is not None:  # last, because it looks at the disk
        there = f"--record {args.record} exists already: give another file"
        refuse(args.record.exists(), there)  # --overwrite is of --json
        check_whole_file(args.record, overwrite=False)
