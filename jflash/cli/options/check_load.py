"""Compare texts under load with those of an idle engine, bit for bit.

Requests of all kinds come at random beside cancelled ones, in few pages. Each text, its end and its
logprobs must be plain decoding's at batch 1. The exit code is 1 if one differs.
"""

from jflash.cli.command import Options, Parser
from jflash.cli.options.check_lossless import check_layers
from jflash.cli.options.pair import DEFAULT_TARGET, check_pair, model_options
from jflash.cli.options.values import at_least_1, option_name, refuse
from jflash.proof.pairs import PAIRS
from jflash.records.kernels import AUTO

KEPT = "kept there"
PAGE = 64  # tokens; pallas_kernels.block_attention has it too, and is slow to import
SIZES = tuple(name for name in PAIRS if name != "tiny-math")  # that is the default pair
# What --pair stands for, or does not take.
ALONE = {"target": DEFAULT_TARGET, "drafter": None, "quantised": AUTO, "attention_backend": AUTO}
ALONE |= {"block_size": None, "verify_rows": None}
SHORTEST = 12  # tokens of a request, so that prompts of all kinds fit


def declare(parser: Parser) -> None:
    model_options(parser.add_argument_group("models"))
    add = parser.add_argument
    sizes = f"random weights of a published size instead: {', '.join(SIZES)}"
    add("--pair", metavar="NAME", help=sizes)
    add("--layers", type=int, metavar="N", help="of --pair's target, by default all")
    add("--requests", type=int, default=500, metavar="N", help="default 500")
    add("--batch", type=int, default=4, metavar="B", help="requests at once, default 4")
    add("--context", type=int, default=256, metavar="N", help="tokens of a request, default 256")
    add("--pages", type=int, default=6, metavar="N", help="of 64 tokens, default 6: very few")
    chunk = "tokens of a prompt that one pass computes, default 32; alone it computes twice as many"
    add("--prefill-chunk", type=int, default=32, metavar="N", help=chunk)
    steps = "of the engine under load, default 2: prompts take turns with few"
    add("--steps-per-call", type=int, default=2, metavar="N", help=steps)
    add("--seed", type=int, default=0, help="of requests and arrivals, default 0")
    # `check_pair` reads these beside the pair.
    parser.set_defaults(system=None, no_chat_template=False, reasoning="off", draft_rule=None)
    parser.set_defaults(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


def check(options: Options) -> None:
    at_least_1(options, "requests", "batch", "context", "pages", "layers")
    at_least_1(options, "prefill_chunk", "steps_per_call")
    refuse(options.layers and options.pair is None, f"--layers {options.layers} without --pair")
    if options.pair is not None:
        named = f"--pair {options.pair or "''"}"
        refuse(options.pair not in SIZES, f"{named}: use {', '.join(SIZES)}")
        for name, usual in ALONE.items():
            value = getattr(options, name)
            refuse(value != usual, f"{named} beside {option_name(name)} {value}: without it")
        check_layers(options.pair, options.layers)
        shared = options.drafter_dtype and options.tensor_parallel > 1
        rounded = f"{named} beside --drafter-dtype {options.drafter_dtype}"
        refuse(shared, f"{rounded}: not for devices that share the pair")
    context, pages = options.context, -(-options.context // PAGE)
    refuse(context < SHORTEST, f"--context {context}: at least {SHORTEST}")
    needs = f"--pages {options.pages}: a request of {context} tokens needs {pages}"
    refuse(options.pages < pages, needs)
    check_pair(options, drawn=True)
