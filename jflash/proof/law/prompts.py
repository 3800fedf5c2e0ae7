"""Texts whose first part is given as a prompt, against the same texts by steps alone."""

from collections.abc import Sequence

from jflash.proof.digest import Digest, digests
from jflash.proof.law.bench import Bench, Compared, compared
from jflash.proof.law.forms import Way
from jflash.proof.lossless import Executable, Mode, Task, decode
from jflash.records.decoding import Decoding

AFTER = 128  # tokens that steps choose after a long prompt
MOST = 1200  # new tokens of a text whose first part is a long prompt


def halves(bench: Bench, alone: Executable, texts: Sequence[Digest]) -> Compared:
    """The texts with their first halves as prompts: chunks in place of steps."""
    long = [text for text in texts if len(text.tokens) > text.prompt_tokens + 2]
    middle = [(text.prompt_tokens + len(text.tokens)) // 2 for text in long]
    found = []
    for text, end in zip(long, middle, strict=True):
        new = len(text.tokens) - end
        task = Task([text.tokens[:end].tolist()], bench.decoding(new))
        found += digests(decode(alone, Mode("plain", bench.params("plain")), task), task)
    return compared("width 1, batch 1, half of the text as a prompt: plain", long, found)


def long_prompts(
    bench: Bench, way: Way, executable: Executable, texts: Sequence[Digest]
) -> list[Compared]:
    """Two texts that go on by steps, without stops, and then all but their ends as prompts.

    How the texts begin is compared with `texts`, which width 1 and batch 1 decoded.
    """
    room = executable.shape.capacity
    for config in executable.models.configs:
        room = min(room, config.max_position_embeddings)
    begun = list(texts[:2])
    prompts = [text.tokens[: text.prompt_tokens].tolist() for text in begun]
    longer = [_plain(bench, executable, p, min(MOST, room - 1 - len(p))) for p in prompts]
    found = []
    for text in longer:
        prompt = text.tokens[: -min(AFTER, len(text.tokens) // 4)].tolist()
        found.append(_plain(bench, executable, prompt, len(text.tokens) - len(prompt)))
    starts = [_start(text, len(known.tokens)) for text, known in zip(longer, begun, strict=True)]
    name = f"{way.named('plain')}, all but the end of a text as a prompt"
    return [compared(way.named("plain"), begun, starts), compared(name, longer, found)]


def _start(text: Digest, tokens: int) -> Digest:
    return Digest(
        text.prompt_tokens, text.tokens[:tokens], text.logits[:tokens],
        text.keys_values[: tokens - 1],
    )  # fmt: skip


def _plain(bench: Bench, executable: Executable, prompt: list[int], new: int) -> Digest:
    """A text that no stop token ends."""
    task = Task([prompt], Decoding(max_new_tokens=new))
    return digests(decode(executable, Mode("plain", bench.params("plain")), task), task)[0]
