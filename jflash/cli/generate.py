"""generate: from a prompt to its text, one prompt live or a file of them in batches."""

import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from jflash.budget.row_choice import default_rows, with_rows
from jflash.checks import check_request
from jflash.cli.command import Options
from jflash.cli.jax_setup import note_idle_gpu
from jflash.cli.live_text import channel_pieces, paint, texts
from jflash.cli.options.pair import drafter_choice, drafter_name, sampling
from jflash.cli.prompts import Prompt, encode, read_prompts
from jflash.cli.results import (
    Setup,
    as_json,
    batch_statistics,
    describe,
    from_json,
    json_line,
    record,
    statistics,
)
from jflash.draft_error import TEXT, draft_error
from jflash.generate import Generation, Pair, generate, models_for, stream
from jflash.io import PairFiles, configure_pair, load_weights
from jflash.io.harmony import has_channels
from jflash.io.text import before_stop, decode, mark_ids, stop_at_text
from jflash.memory import check_decoding
from jflash.pair import Models, Params
from jflash.records.decoding import Decoding
from jflash.system.hosts import Hosts, joined
from jflash.system.lines import check_whole_file, kept_lines

# Options that decide about the tokens of a file's prompts, and about their batches.
SETTINGS = (
    *("target", "drafter", "dtype", "quantised", "drafter_dtype", "attention_backend"),
    *("block_size", "verify_rows", "draft_rule", "oracle", "batch_size", "max_new_tokens"),
    *("stop", "seed"),
)


class Job(NamedTuple):
    """Requests that fit their models, known before a weight is read."""

    files: PairFiles
    tokenizer: Any  # None if the target has none: ids in, ids out
    prompts: list[list[int]]
    decodings: list[Decoding]  # each prompt's

    def text(self, generation: Generation, stops: list[str]) -> str | None:
        if self.tokenizer is None:
            return None
        return before_stop(decode(self.tokenizer, generation.token_ids), stops)

    @property
    def digest(self) -> str:
        """Of what is asked: the prompts, how each is drawn, and where it stops."""
        asked = [(d.sampling, d.stop_token_ids) for d in self.decodings]
        return hashlib.sha256(repr((self.prompts, asked)).encode()).hexdigest()[:16]


def run(options: Options) -> None:
    prompts = read_prompts(options, sampling(options))
    if options.output is not None:
        with joined(options.coordinator, options.num_hosts, options.host_index) as hosts:
            _many(options, prompts, hosts)
        return
    job = _prepare(options, prompts)
    _check_device(options, job, 1)
    pair, setup = _load(options, job.files)
    if options.json:
        [result] = generate(pair, job.prompts, job.decodings)
        [decoding] = job.decodings
        print(json_line(record(result, job.text(result, options.stop), setup, decoding.sampling)))
    else:
        _live(options, job, pair, setup)


def _prepare(options: Options, prompts: list[Prompt]) -> Job:
    """Configs and tokenizer, the prompts as ids; ValueError for what the models cannot serve."""
    files = configured(options, min(options.batch_size, len(prompts)))
    needed = bool(options.stop) or any(prompt.text is not None for prompt in prompts)
    tokenizer = files.target.tokenizer() if needed or files.target.has_tokenizer() else None
    stops = [] if options.ignore_eos else files.target.stop_ids(tokenizer)
    stops = [*stops, *options.stop_token_ids, *mark_ids(tokenizer, options.stop)]
    decoding = Decoding(
        max_new_tokens=options.max_new_tokens,
        stop_token_ids=tuple(dict.fromkeys(stops)),
        seed=options.seed,
        oracle=options.oracle,
        stop_when=stop_at_text(tokenizer, options.stop) if options.stop else None,
    )
    decodings = [replace(decoding, sampling=prompt.sampling) for prompt in prompts]
    # All batches of a run share one program, or a greedy prompt would meet two.
    files = with_sampling(files, decodings, options.draft_rule)
    ids = []
    for prompt in prompts:
        try:
            ids.append(encode(prompt, tokenizer, options))
            check_request(files.models, ids[-1], decoding)
        except ValueError as error:
            raise ValueError(f"{prompt.where}{error}") from None
    return Job(files, tokenizer, ids, decodings)


def configured(options: Options, batch: int) -> PairFiles:
    """The pair that the options name, at its width and its rows."""
    source, seed = drafter_choice(drafter_name(options))
    files = configure_pair(
        options.target, source, dtype=options.dtype, block_size=options.block_size,
        drafter_seed=seed, attention_backend=options.attention_backend,
        tensor_parallel=options.tensor_parallel, experts_over=options.experts_over,
        quantised=options.quantised, drafter_dtype=options.drafter_dtype, batch=batch,
    )  # fmt: skip
    rows = options.verify_rows
    rows = default_rows(files.models, batch) if rows is None else rows
    return replace(files, models=with_rows(files.models, rows, batch))


def loaded(files: PairFiles, progress: bool) -> Pair:
    """The pair with its weights; lines on stderr say how rounded and quantised ones decode, and
    what a drafter takes from its target because its file does not say it."""

    def note_rounding(exact: Models, params: Params, other: Models, rounded: Params) -> None:
        text = list(range(100))
        if files.target.has_tokenizer():
            text = files.target.tokenizer().encode(TEXT, add_special_tokens=False)
        error = draft_error(exact, params, other, rounded, text)
        print(f"the drafter's products are in float8: {error}", file=sys.stderr)

    pair = load_weights(files, progress, note_rounding)
    if (scale := files.targets_scale) is not None:
        note = f"the drafter's embeddings are multiplied by {scale:g}, as its target's are"
        print(f"{note}: its config does not say by what", file=sys.stderr)
    if method := files.target.quantised:
        kept = any(layer.kept for layer in files.models.target.config.layers)
        memory = "kept as codes with scales" if kept else "dequantised when they are read"
        note = f"the target's weights are quantised ({method}): {memory}"
        print(f"{note}; scales of activations are not applied", file=sys.stderr)
    return pair


def with_sampling(files: PairFiles, decodings: Sequence[Decoding], rule: str | None) -> PairFiles:
    """The pair compiled so that it can serve these requests; None leaves its draft rule."""
    models = files.models if rule is None else replace(files.models, draft_rule=rule)
    return replace(files, models=models_for(models, decodings))


def _check_device(options: Options, job: Job, batch: int) -> int:
    """The cache slots of a sequence; ValueError if the batch takes more memory than there is."""
    note_idle_gpu()
    longest = max(map(len, job.prompts))
    return check_decoding(job.files.models, batch, longest, options.max_new_tokens)


def _load(options: Options, files: PairFiles) -> tuple[Pair, Setup]:
    begin = time.perf_counter()
    pair = loaded(files, progress=sys.stderr.isatty() and not options.json)
    jax.block_until_ready(pair.params)
    seconds = time.perf_counter() - begin
    return pair, describe(pair, options.target, drafter_name(options), options.seed, seconds)


def _live(options: Options, job: Job, pair: Pair, setup: Setup) -> None:
    """Text on stdout as it arrives, then a line of statistics on stderr."""
    colour = use_colour()
    begin = time.perf_counter()
    first, last = None, None

    def chunks():
        nonlocal first, last
        for chunk in stream(pair, job.prompts[0], job.decodings[0]):
            first = first or time.perf_counter()
            last = chunk.generation
            yield chunk

    if options.prompt_ids is None and answers_in_channels(options, job.tokenizer):
        shown = channel_pieces(chunks(), job.tokenizer, options.stop)
        pieces = (piece.shown for piece in shown)
    else:
        as_text = _ids_as_text
        if job.tokenizer is not None:
            as_text = functools.partial(decode, job.tokenizer)
        pieces = texts(chunks(), as_text, options.stop)
    for step, piece in enumerate(pieces):
        print(paint(piece, step, colour) if options.show_steps else piece, end="", flush=True)
    print(flush=True)
    assert first is not None and last is not None
    waited = first - begin - last.seconds.compile
    print(statistics(last, setup, waited), file=sys.stderr)


class Batches(NamedTuple):
    """Prompts of a file as batches, which all have one shape, and the pair that decodes them."""

    options: Options
    prompts: list[Prompt]
    job: Job
    pair: Pair
    setup: Setup
    size: int  # prompts of a batch
    capacity: int  # cache slots of a sequence

    @property
    def parts(self) -> list[slice]:
        count = len(self.prompts)
        return [slice(begin, begin + self.size) for begin in range(0, count, self.size)]

    def decoded(self, parts: Sequence[slice]) -> Iterator[list[Generation]]:
        """The results of each part of the prompts, with a bar on stderr."""
        job = self.job
        total = sum(len(job.prompts[part]) for part in parts)
        with tqdm(total=total, desc="decoding", unit="prompt", file=sys.stderr) as bar:
            for part in parts:
                ids, decodings = job.prompts[part], job.decodings[part]
                # Copies of the last prompt fill the batch, and decode no longer than it.
                missing = self.size - len(ids)
                yield generate(
                    self.pair, ids + ids[-1:] * missing, decodings + decodings[-1:] * missing,
                    first_index=part.start, capacity=self.capacity,
                )[: len(ids)]  # fmt: skip
                bar.update(len(ids))

    def written(
        self, write: Callable[[str], None], results: Iterable[list[Generation]]
    ) -> list[list[Generation]]:
        """The results of all parts, after a JSON line for each prompt was written."""
        batches = []
        for part, batch in zip(self.parts, results, strict=True):
            for prompt, result in zip(self.prompts[part], batch, strict=True):
                text = self.job.text(result, self.options.stop)
                line = record(result, text, self.setup, prompt.sampling)
                write(json_line((prompt.extra or {}) | line))
            batches.append(batch)
        return batches


def _batches(options: Options, prompts: list[Prompt], hosts: Hosts) -> Batches:
    job = _prepare(options, prompts)
    hosts.agree({name: getattr(options, name) for name in SETTINGS} | {"prompts": job.digest})
    size = min(options.batch_size, len(prompts))
    capacity = _check_device(options, job, size)
    return Batches(options, prompts, job, *_load(options, job.files), size, capacity)


def _many(options: Options, prompts: list[Prompt], hosts: Hosts) -> None:
    """A JSON line for every prompt, in their order.

    Of one host a batch's lines are written when it ends. Several decode the batches that one would,
    in turns, and host 0 writes all lines.
    """
    place, lines = (options.output, options.overwrite), functools.partial(kept_lines, say=_note)
    if hosts.count == 1:
        with lines(*place) as write:  # first: a second run is refused before it reads weights
            work = _batches(options, prompts, hosts)
            batches = work.written(write, work.decoded(work.parts))
    else:
        if hosts.index == 0:  # a look only: a lost host ends this one, which then leaves nothing
            check_whole_file(*place, lines)
        work = _batches(options, prompts, hosts)
        numbers, count = hosts.share(len(work.parts)), len(work.parts)
        own = map(as_json, work.decoded([work.parts[number] for number in numbers]))
        texts = hosts.gathered(dict(zip(numbers, own, strict=True)), count)
        if texts is None:
            return
        with lines(*place) as write:
            batches = work.written(write, map(from_json, texts))
    print(batch_statistics(batches, work.setup, hosts.count), file=sys.stderr)


def _note(line: str) -> None:
    tqdm.write(line, file=sys.stderr)  # a bar may stand there


def answers_in_channels(options: Options, tokenizer: Any) -> bool:
    """Whether answers to texts as prompts have gpt-oss's channels."""
    return not options.no_chat_template and has_channels(tokenizer)


def use_colour() -> bool:
    """Colours on a terminal that has them, unless its user wants none (no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def _ids_as_text(ids: list[int]) -> str:
    return "".join(f"{i} " for i in ids)
