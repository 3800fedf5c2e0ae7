"""Load a server for minutes, and compare every text.

The command starts `jflash serve` with the pair and loads it from many clients: some disconnect in
the middle of an answer, some read slowly, some send garbage. Every text that is read to its end
must equal the idle server's. The last line is a JSON object; the exit code is 1 after a failure.
"""

from jflash.cli.command import Options, Parser
from jflash.cli.options.pair import check_pair, model_options
from jflash.cli.options.values import at_least_1, check_seed, refuse

KEPT = "kept"


def declare(parser: Parser) -> None:
    model_options(parser.add_argument_group("models"))
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, metavar="M", help="default 30")
    add("--clients", type=int, default=16, metavar="N", help="at once, default 16")
    add("--seed", type=int, default=0, help="of the load, default 0")
    add("--max-batch", type=int, default=4, metavar="B", help="of the server, default 4")
    add("--max-context", type=int, default=512, metavar="N", help="of the server, default 512")
    # `check_pair` reads these beside the pair.
    parser.set_defaults(system=None, no_chat_template=False, reasoning="off", draft_rule=None)
    parser.set_defaults(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


def check(options: Options) -> None:
    at_least_1(options, "clients", "max_batch", "max_context")
    check_seed(options.seed)
    refuse(not 0 < options.minutes < 1e6, f"--minutes {options.minutes}: above 0")
    check_pair(options, drawn=False)
