"""Within a capacity bucket nothing compiles twice, by JAX's own compile events."""

import functools
import threading
from types import SimpleNamespace

import pytest

from jflash.compiled import programs
from jflash.compiled.shape import Shape
from jflash.generate import generate, stream
from tests.support.pairs import prompts, random_pair


def test_lengths_limits_and_stops_do_not_compile_anew(compilations):
    pair = random_pair(intermediate_size=37)  # a shape of its own: no other test compiled it
    generate(pair, prompts(1, seed=1), max_new_tokens=5)
    assert compilations, "the listener hears nothing: the test would pass in vain"
    list(stream(pair, prompts(1, seed=1)[0], max_new_tokens=5))
    before = len(compilations)
    for seed, (new, stops) in enumerate([(1, ()), (2, (3,)), (17, (4, 5, 6)), (100, range(16))]):
        prompt = prompts(1, seed=seed, low=1, high=120)[0]
        generate(pair, [prompt], max_new_tokens=new, stop_token_ids=list(stops))
        generate(pair, [prompt], max_new_tokens=new, oracle=True, seed=seed)
        list(stream(pair, prompt, max_new_tokens=new, stop_token_ids=list(stops)))
    assert len(compilations) == before


def test_another_bucket_does_compile(compilations):
    pair = random_pair(intermediate_size=38)
    generate(pair, prompts(1), max_new_tokens=5)
    before = len(compilations)
    generate(pair, prompts(1), max_new_tokens=400)
    assert len(compilations) > before


def test_a_program_compiles_while_the_next_is_traced(monkeypatch):
    pair, traced = random_pair(intermediate_size=39), threading.Event()
    waits = SimpleNamespace(compile=lambda: traced.wait(20))

    def lower_run(*_):
        traced.set()
        return SimpleNamespace(compile=lambda: "run")

    monkeypatch.setattr(programs, "lower_prefill", lambda *_: waits)
    monkeypatch.setattr(programs, "lower_run", lower_run)
    compiled = programs.compile_programs(pair.models, pair.params, Shape.of(1, 256))
    assert compiled[:2] == (True, "run")


def test_what_did_not_compile_is_compiled_again(monkeypatch):
    pair, shape = random_pair(intermediate_size=40), Shape.of(1, 256)
    memory = iter([MemoryError("not now"), None])

    def compile():
        if error := next(memory):
            raise error
        return "run"

    for name in ("_compiling_prefill", "_compiling_run"):  # no test before or after shares these
        own = functools.lru_cache(getattr(programs, name).__wrapped__)
        monkeypatch.setattr(programs, name, own)
    monkeypatch.setattr(programs, "lower_prefill", lambda *_: SimpleNamespace(compile=lambda: "it"))
    monkeypatch.setattr(programs, "lower_run", lambda *_: SimpleNamespace(compile=compile))
    with pytest.raises(MemoryError, match="not now"):
        programs.compile_programs(pair.models, pair.params, shape)
    assert programs.compile_programs(pair.models, pair.params, shape)[:2] == ("it", "run")
