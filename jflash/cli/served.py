"""What a server is made of, and a replica on Ray: by the options of `jflash serve`."""

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.monitoring
from tqdm import tqdm

from jflash.cli.generate import configured, with_sampling
from jflash.cli.generate import loaded as read
from jflash.cli.jax_setup import note_idle_gpu
from jflash.cli.options.pair import sampling
from jflash.pair import Models
from jflash.records.decoding import Decoding, Sampling
from jflash.serving.engine import Engine
from jflash.serving.grammar import Grammars
from jflash.serving.paging.room import need_of, pages_within
from jflash.serving.request import Request
from jflash.system.device import device_memory
from jflash.system.files import UTF_8
from pallas_kernels.block_attention import PAGE

if TYPE_CHECKING:
    from jflash.server.settings import Settings

COMPILED = "/jax/core/compile/backend_compile_duration"  # the event of jax.monitoring
FAILED = 1  # exit code of a server whose device failed


def api_keys(options: argparse.Namespace) -> list[str]:
    """The keys of the options, the file and the environment, without white space around them, for
    none can be sent: a secret's last line often has its end. ValueError for a file or a variable
    without a key."""
    keys = [key.strip() for key in options.api_key]
    if options.api_key_file is not None:
        try:
            lines = Path(options.api_key_file).read_text(encoding=UTF_8).splitlines()
        except OSError as error:
            raise ValueError(f"--api-key-file {options.api_key_file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"--api-key-file {options.api_key_file} is no text in UTF-8") from None
        stripped = [line.strip() for line in lines if line.strip()]
        if not stripped:
            raise ValueError(f"--api-key-file {options.api_key_file} holds no key")
        keys += stripped
    if given := os.environ.get("JFLASH_API_KEY"):
        if not given.strip():
            raise ValueError(f"JFLASH_API_KEY {given!r} holds no key: unset it to serve everyone")
        keys.append(given.strip())
    return keys


class Loaded(NamedTuple):
    """What a server is made of."""

    engine: Engine
    grammars: Grammars
    settings: "Settings"


def loaded(options: argparse.Namespace) -> Loaded:
    """Loads and compiles the pair; ValueError, before a weight is read, for what does not fit."""
    from jflash.server.settings import Settings

    files = configured(options, batch=options.max_batch)
    files = with_sampling(files, [Decoding()], options.draft_rule)
    tokenizer = files.target.tokenizer()
    template = template_of(options, tokenizer)
    stop_ids = files.target.stop_ids(tokenizer)
    note_idle_gpu()
    context = context_of(options, files.models)
    pages = _pages(options, files.models, context)
    pair = read(files, progress=sys.stderr.isatty())
    jax.block_until_ready(pair.params)
    name = options.served_model_name or _name(options.target)
    slots = f"{options.max_batch} requests at once of at most {context} tokens"
    sizes = options.max_batch, context, options.steps_per_call, options.states
    taken = pages * need_of(files.models, *sizes).page / 1e9
    memory = f"{pages} pages, {pages * PAGE} tokens in all, {taken:.3g} GB"
    print(f"{name}: {slots}; {memory}; compiles", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    with _progress() as compiled:
        engine = Engine(
            pair, max_batch=options.max_batch, max_context=context, pages=pages,
            max_queue=options.max_queue, steps_per_call=options.steps_per_call,
            states=options.states,
        )  # fmt: skip
        grammars = Grammars(tokenizer, files.models.target.config.vocab_size, stop_ids)
        _warm_up(engine, grammars, tuple(stop_ids))
    took = f"compiled {compiled()} programs in {time.perf_counter() - begin:.1f} s"
    print(took, file=sys.stderr, flush=True)
    settings = Settings(
        tokenizer=tokenizer,
        name=name,
        version=f"jflash {_version()}",
        template=template,
        stop_ids=tuple(stop_ids),
        sampling=sampling(options),
        reasoning=options.reasoning == "on",
        created=int(time.time()),
        max_accept=files.models.max_accept,
        max_body=options.max_body,
        slots=options.max_batch,
        max_queue=options.max_queue,
        request_timeout=options.request_timeout,
    )
    return Loaded(engine, grammars, settings)


def _warm_up(engine: Engine, grammars: Grammars, stop_ids: tuple[int, ...]) -> None:
    """Runs a request of each kind, so that clients meet compiled programs."""
    length = min(2, engine.max_context - 1)
    plain = Request(prompt_ids=[0], max_tokens=length, stop_ids=stop_ids)
    formed = replace(plain, grammar=grammars.compile("json_schema", '{"type": "object"}'))
    for request in (plain, replace(plain, sampling=Sampling(temperature=1.0)), formed):
        engine.generate([request])


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[], int]]:
    """Counts programs as they are compiled in the block; a terminal sees the number grow."""
    with tqdm(desc="compiling", unit=" programs", disable=None, leave=False) as bar:
        ended = threading.Event()

        def another() -> None:
            if not ended.is_set():
                bar.update()

        yield counted_compilations(another)
        ended.set()


def counted_compilations(also: Callable[[], None] = lambda: None) -> Callable[[], int]:
    """Tells how many programs were compiled from now on, and calls `also` for each: requests
    should cause none."""
    seen = list[str]()

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED:
            seen.append(event)
            also()

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: len(seen)


def context_of(options: argparse.Namespace, models: Models) -> int:
    """The longest request in tokens; ValueError for one that the models have no positions for."""
    most = min(config.max_position_embeddings for config in models.configs)
    if options.max_context is not None and options.max_context > most:
        raise ValueError(f"--max-context {options.max_context} passes the model's {most} positions")
    if options.max_context == 1:
        raise ValueError("--max-context 1 has no room for a prompt and a new token")
    return options.max_context or most


def _pages(options: argparse.Namespace, models: Models, context: int) -> int:
    """The pages of the options, or as many as are useful; ValueError for those that do not fit."""
    shape = options.max_batch, context, options.pages, device_memory()
    return pages_within(models, *shape, options.steps_per_call, options.states)


def template_of(options: argparse.Namespace, tokenizer: Any) -> str:
    """The source of all chat templates, empty without one; ValueError for a thinking mode that they
    lack."""
    given = getattr(tokenizer, "chat_template", None) or ""
    source = given if isinstance(given, str) else "\n".join(given.values())
    if options.reasoning == "on" and "enable_thinking" not in source:
        raise ValueError("--reasoning on: the chat template has no enable_thinking")
    return source


def _name(target: str) -> str:
    """A hub id unchanged; for a local folder only the last two parts of its path."""
    path = Path(target)
    return "/".join(path.parts[-2:]) if path.exists() else target


def _version() -> str:
    try:
        return version("jflash")
    except PackageNotFoundError:
        return "from its source"
