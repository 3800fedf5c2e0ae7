"""Talk to a model, turn by turn, several tokens a step.

A line is a turn; /reset forgets all turns, /quit or the end of the input ends. Ctrl-C stops an
answer, which stays in the conversation as far as it came. On a terminal the tokens of each step
have one colour (not with NO_COLOR or TERM=dumb); τ and tokens/s follow each answer on stderr.
Thoughts in gpt-oss's channels are shown in <think> and </think>, and the conversation leaves them
out.
"""

from jflash.cli.command import Options, Parser
from jflash.cli.options.pair import check_pair, model_options, prompt_options, sampling_options
from jflash.cli.options.values import at_least_1


def declare(parser: Parser) -> None:
    model_options(parser.add_argument_group("models"))
    prompt_options(parser.add_argument_group("prompts"))
    sampling_options(parser.add_argument_group("decoding"), max_new_tokens=512)


def check(options: Options) -> None:
    at_least_1(options, "max_new_tokens")
    check_pair(options, drawn=options.temperature > 0)
