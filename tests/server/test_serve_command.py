"""What `jflash serve` decides before it listens: its keys, and the pages that its memory holds."""

import argparse

import pytest

from jflash.cli import serve
from jflash.embedded import EMBEDDED_PAIR
from jflash.io import configure_pair
from jflash.memory import memory_budget, shape_for
from jflash.programs import Shape
from pallas_kernels.block_attention import PAGE


def test_pages_are_those_of_the_longest_requests_or_those_that_fit(monkeypatch):
    models = configure_pair(EMBEDDED_PAIR / "target", EMBEDDED_PAIR / "drafter").models

    def budget(context: int) -> int:
        return memory_budget(models, shape_for(models, Shape.of(4, 0), 4, context)).total

    def pages(limit: int | None) -> int:
        monkeypatch.setattr(serve, "device_memory", lambda: limit)
        return serve.pages_that_fit(models, 4, 1024)

    assert pages(None) == pages(budget(1024)) == 4 * 1024 // PAGE
    half = pages(budget(512))
    # A prompt's last chunk is padded, so that a little more than 512 tokens fit as well.
    assert 4 * 512 // PAGE <= half < 4 * 1024 // PAGE
    assert budget(half * PAGE // 4) <= budget(512)
    with pytest.raises(ValueError, match="more than the"):
        pages(budget(1) - 1)


def test_keys_come_from_options_a_file_and_the_environment(monkeypatch, tmp_path):
    def keys(file: str | None) -> list[str]:
        return serve.api_keys(argparse.Namespace(api_key=["a"], api_key_file=file))

    file = tmp_path / "keys"
    file.write_text("b\n\n c \n")
    monkeypatch.delenv("JFLASH_API_KEY", raising=False)
    assert keys(None) == ["a"]
    monkeypatch.setenv("JFLASH_API_KEY", "d")
    assert keys(str(file)) == ["a", "b", "c", "d"]
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no key"):
        keys(str(file))
