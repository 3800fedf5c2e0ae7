"""Shows that greedy decoding is lossless on this device, bit for bit, or where it is not.

law: plain decoding at width 1 and batch 1 against other widths, batches, capacities, chunks and
drafters, a replay with wrong tokens, and texts given as prompts. Tokens, logits, keys and values
must have the same bits. oracle: trained, random and replaying drafters decode --tokens for every
pair and batch size through one executable, and must give what its oracle gives, which accepts no
draft; the law implies this. devices: as many devices as --tensor-parallel names decode what one
does, with the same keys and values. ops: each operation of a target's sizes alone, at 1 to 512
rows, and the columns of a product that one of 2 and of 4 devices has. kept: a target kept in FP8
and in INT4 decodes the text of the arrays that its codes stand for. Faults planted on purpose must
be caught.
Exit code 0: lossless; 1: not so; 2: bad input.
"""

from jflash.bench.shapes import SHAPES, model_shape
from jflash.cli.command import Options, Parser
from jflash.cli.options.results import backend_options
from jflash.cli.options.values import at_least_1, check_seed, counts, refuse, refuse_unread
from jflash.proof.pairs import FORMS, PAIRS
from jflash.records.parts import OVER

CHECKS = ("law", "oracle", "devices", "ops", "kept")
DEVICES = (2, 4)
OF_ORACLE = {"batches": (1, 8, 32), "tokens": 100_000, "min_count": 1000, "min_distinct": 1000}
KEPT = "written there too"


def declare(parser: Parser) -> None:
    add = parser.add_argument
    usual = "a dense and a MoE pair of 4 layers on a GPU, tiny-math on a CPU"
    add("--pairs", type=names, help=f"of {','.join(PAIRS)}; by default {usual}")
    add(
        "--layers",
        type=int,
        help="of the targets with random weights, by default all of a named pair's",
    )
    usual = "default law, or with --tensor-parallel devices"
    add("--checks", type=names, help=f"of {','.join(CHECKS)}; {usual}")
    add("--whole", action="store_true", help="the law by three times as many programs")
    several = f"of the devices' check, default {','.join(map(str, DEVICES))}"
    add("--tensor-parallel", type=counts, metavar="1,2,4", help=several)
    experts = "of that check too: the devices share each expert's columns (default), or whole ones"
    add("--experts-over", choices=OVER, default=OVER[0], help=experts)
    codes = "of that check too: the target keeps random codes of this form"
    add("--quantised", choices=FORMS, default="", help=codes)
    oracle = parser.add_argument_group("of the oracle's check").add_argument
    oracle("--batches", type=counts, default=(1, 8, 32), metavar="1,8,32", help="default 1,8,32")
    oracle("--tokens", type=int, default=100_000, help="by the oracles in all, default 100000")
    oracle("--min-count", type=int, default=1000, help="of every acceptance length, default 1000")
    oracle("--min-distinct", type=int, default=1000, help="tokens in the outputs, default 1000")
    add("--dtype", choices=("float32", "bfloat16"), help="by default the device's")
    add("--drafter-dtype", choices=("float8",), default="", help="of all drafters")
    backend_options(parser)
    add("--seed", type=int, default=0, help="of prompts, wrong drafts and a random drafter")


def names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split(",")))


def check_layers(pair: str, layers: int | None) -> None:
    """ValueError if a pair with random weights has fewer layers."""
    if layers is not None and pair in SHAPES:
        most = model_shape(pair).target.num_layers
        refuse(layers > most, f"--layers {layers}: {pair} has {most}")


def refuse_layers(args: Options) -> None:
    """ValueError if the embedded pair, which is never cut, is asked for with fewer layers."""
    refuse_unread(args, {"layers": None}, "is for random weights, and tiny-math has its own")


def checks_of(args: Options) -> tuple[str, ...]:
    """The checks that are asked for, by name or by what only one of them reads."""
    return args.checks or (CHECKS[:1] if args.tensor_parallel is None else ("devices",))


def check(args: Options) -> None:
    checks = checks_of(args)
    for name in args.pairs or ():
        why = f"--pairs: no pair is called {name!r}, use {','.join(PAIRS)}"
        refuse(name not in PAIRS, why)
    wrong = set(checks) - set(CHECKS)
    refuse(wrong, f"--checks {','.join(checks)}: of {','.join(CHECKS)}")
    if args.tensor_parallel is not None:
        asked = ",".join(map(str, args.tensor_parallel))
        refuse("devices" not in checks, f"--tensor-parallel {asked} is for --checks devices")
        alone = f"--tensor-parallel {asked}: one device is what others are compared with"
        refuse(max(args.tensor_parallel) < 2, alone)
    alone = args.experts_over != OVER[0] and "devices" not in checks
    refuse(alone, f"--experts-over {args.experts_over} is for --checks devices")
    refuse(args.whole and "law" not in checks, "--whole is for --checks law")
    form = f"--quantised {args.quantised}"
    refuse(args.quantised and "devices" not in checks, f"{form} is for --checks devices")
    whole = args.quantised and args.experts_over != OVER[0]
    refuse(whole, f"{form}: not for --experts-over {args.experts_over}")
    shared = args.drafter_dtype and "devices" in checks
    refuse(shared, f"--drafter-dtype {args.drafter_dtype}: not for devices that share the pair")
    rounded = args.drafter_dtype and "kept" in checks
    refuse(rounded, f"--drafter-dtype {args.drafter_dtype}: not for a target that is kept as codes")
    at_least_1(args, "tokens", "min_count", "min_distinct", "layers")
    if "oracle" not in checks:
        refuse_unread(args, OF_ORACLE, "is for --checks oracle")
    if checks == ("ops",):
        unread = {"layers": None, "drafter_dtype": ""}
        refuse_unread(args, unread, "is not for --checks ops: it takes single operations")
    if args.pairs == ("tiny-math",):
        refuse_layers(args)
    for name in args.pairs or ():
        check_layers(name, args.layers)
    check_seed(args.seed)
