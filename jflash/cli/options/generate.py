"""Decode a prompt with DFlash, several tokens a step."""

from pathlib import Path

from jflash.cli.command import Options, Parser
from jflash.cli.options.hosts import check_hosts, host_options
from jflash.cli.options.pair import (
    check_oracle,
    check_pair,
    model_options,
    oracle_option,
    prompt_options,
    sampling_options,
)
from jflash.cli.options.values import at_least_1, ids, refuse, refuse_replacing

BATCH = 8  # prompts at a time


def declare(parser: Parser) -> None:
    model_options(parser.add_argument_group("models"))
    add = parser.add_mutually_exclusive_group().add_argument
    standard = "-, or a pipe: standard input; default: a word problem"
    add("prompt", nargs="?", metavar="PROMPT", help=standard)
    add("--prompt-ids", type=ids, metavar="1,2,3", help="token ids instead")
    add("--prompt-file", type=Path, metavar="FILE", help="text, UTF-8")
    many = 'many: a line each, {"prompt": text} or {"prompt_ids": [ids]}; needs --output'
    add("--prompts", type=Path, metavar="FILE.jsonl", help=many)
    add = parser.add_argument
    lines = (
        "a result a line, there when all are; an end before that leaves FILE.jsonl.unfinished, "
        "a kill only when the next run begins"
    )
    add("--output", type=Path, metavar="FILE.jsonl", help=lines)
    add("--overwrite", action="store_true", help="replace an existing --output")
    add("--batch-size", type=int, default=BATCH, help=f"of --prompts, default {BATCH}")
    host_options(parser.add_argument_group("hosts, of --prompts"))
    prompt_options(parser)
    decoding = parser.add_argument_group("decoding")
    sampling_options(decoding, max_new_tokens=256)
    add = decoding.add_argument
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the text; repeatable")
    add("--stop-token-ids", type=ids, default=[], metavar="1,2", help="besides the model's")
    add("--ignore-eos", action="store_true", help="do not stop at the model's stop tokens")
    oracle_option(decoding)
    add = parser.add_argument_group("output").add_argument
    add("--show-steps", action="store_true", help="colour each step's tokens")
    add("--json", action="store_true", help="one JSON object on stdout")


def check(options: Options) -> None:
    o = options
    many, templated = o.prompts is not None, o.prompt_ids is None
    refuse(many and o.output is None, "--prompts needs --output FILE.jsonl")
    refuse(not many and o.output is not None, "--output needs --prompts FILE.jsonl")
    refuse(o.json and many, "--json with --prompts: every line of --output is such an object")
    refuse(o.show_steps and (o.json or many), "--show-steps with --json or --prompts")
    refuse(o.overwrite and not many, "--overwrite without --output")
    alone = o.batch_size != BATCH and not many
    refuse(alone, f"--batch-size {o.batch_size} without --prompts")
    refuse(o.system and not templated, "--system with --prompt-ids")
    thinks = o.reasoning != "off"
    refuse(thinks and not templated, f"--reasoning {o.reasoning} without the chat template")
    refuse("" in o.stop, "--stop '': an empty text is everywhere")
    refuse(o.num_hosts is not None and not many, f"--num-hosts {o.num_hosts} without --prompts")
    check_hosts(o)
    at_least_1(o, "batch_size")
    check_pair(o, drawn=o.temperature > 0 or many)
    check_oracle(o)
    if o.output is not None:
        refuse_replacing(o.output, o.prompts)
