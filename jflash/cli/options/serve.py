"""Serve a model over HTTP, in the form of OpenAI's API.

The HTTP server has OpenAI's routes under /v1 and a chat page at /. Without --host it listens on
this machine only. SIGTERM ends it after the running requests, or after --shutdown-timeout. Its exit
code is 1 if the device fails or hangs.
"""

import argparse
import re

from jflash.cli.command import Parser
from jflash.cli.options.pair import check_pair, filter_options, model_options
from jflash.cli.options.replicas import COUNT
from jflash.cli.options.values import at_least_1, refuse
from jflash.records.decoding import DRAFT_RULES

KEY = "requests must have it; may be repeated; also from JFLASH_API_KEY"
PAGES = """of 64 tokens, which all requests share; default: enough for --max-batch of the longest,
and for those whose prompts are computed ahead, or as many as fit"""
DRAFTS = """at a temperature: the drafter's best tokens, or drawn from it; default: drawn, but for
requests with a seed"""
MOST = "as many while more than --max-batch requests wait or run for each; default: --replicas"
STATES = """copies of recurrent states, with which prefixes of hybrids begin; default: one for each
of --max-batch, at least 4; 0: they are computed again"""
NAME = "default: the hub id, or the last two parts of the target's path"
# As browsers send it: in small letters, and nothing after the host or its port.
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+")
CONTEXT = """tokens of a request, new ones included; default: the model's positions, for which
heads of 256 dims need much memory"""


def declare(parser: Parser) -> None:
    model_options(parser.add_argument_group("models"))
    _server_options(parser.add_argument_group("server"))
    _engine_options(parser.add_argument_group("engine"))
    replicas = parser.add_argument_group("replicas")
    replicas.add_argument("--replicas", type=int, metavar="N", help=COUNT.format("pair"))
    replicas.add_argument("--max-replicas", type=int, metavar="N", help=MOST)
    _default_options(parser.add_argument_group("defaults of a request"))
    # `check_pair` reads these; a server leaves them to its requests.
    parser.set_defaults(system=None, no_chat_template=False, seed=0)


def _server_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="default 127.0.0.1: this machine only")
    add("--port", type=int, default=8000, help="default 8000; 0: any free port")
    add("--served-model-name", metavar="NAME", help=NAME)
    add("--api-key", metavar="KEY", action="append", default=[], help=KEY)
    add("--api-key-file", metavar="FILE", help="keys, one a line")
    add("--allow-origin", metavar="URL", action="append", default=[], help="of pages elsewhere")
    add("--max-body", type=int, default=4 * 2**20, metavar="BYTES", help="default 4 MiB")
    add("--request-timeout", type=float, default=600.0, metavar="S", help="default 600 seconds")
    add("--shutdown-timeout", type=float, default=30.0, metavar="S", help="default 30 seconds")
    add("--hang-timeout", type=float, default=300.0, metavar="S", help="default 300 seconds")


def _engine_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-context", type=int, metavar="N", help=CONTEXT)
    add("--max-batch", type=int, default=8, metavar="B", help="requests at once, default 8")
    steps = "of a call, default 2, of a small target on a GPU 4: fewer let a request begin sooner"
    add("--steps-per-call", type=int, metavar="N", help=steps)
    add("--pages", type=int, metavar="N", help=PAGES)
    add("--states", type=int, metavar="N", help=STATES)
    add("--max-queue", type=int, default=256, metavar="N", help="that may wait, default 256")
    add("--draft-rule", choices=DRAFT_RULES, help=DRAFTS)


def _default_options(group: argparse._ArgumentGroup) -> None:
    filter_options(group)
    thinking = "the template's thinking mode"
    group.add_argument("--reasoning", choices=("on", "off"), default="off", help=thinking)


def check(options: argparse.Namespace) -> None:
    o = options
    at_least_1(
        o,
        "max_context",
        "max_batch",
        "steps_per_call",
        "pages",
        "max_queue",
        "max_body",
        "replicas",
    )
    refuse(o.states is not None and o.states < 0, f"--states {o.states} must be at least 0")
    refuse(not 0 <= o.port < 2**16, f"--port {o.port} must be within 0 … {2**16 - 1}")
    for name in ("request_timeout", "shutdown_timeout", "hang_timeout"):
        value = getattr(o, name)
        bounds = "seconds above 0, below 1e9"
        refuse(not 0 < value < 1e9, f"--{name.replace('_', '-')} {value}: {bounds}")
    for key in o.api_key:
        named = f"--api-key {key!r} is empty"
        refuse(not key.strip(), f"{named}: omit the option to serve every client")
    name = o.served_model_name
    refuse(name is not None and not name.strip(), f"--served-model-name {name!r} is empty")
    for origin in o.allow_origin:
        named = f"--allow-origin {origin!r} is no origin, such as https://page.example:8080"
        refuse(not ORIGIN.fullmatch(origin), f"{named}, or * for all pages")
    most = o.max_replicas
    refuse(most is not None and o.replicas is None, f"--max-replicas {most} needs --replicas")
    few = most is not None and most < o.replicas
    refuse(few, f"--max-replicas {most}: at least --replicas {o.replicas}")
    check_pair(o, drawn=True)
