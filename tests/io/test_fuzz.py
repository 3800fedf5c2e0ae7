"""Mutated checkpoints: whatever the files say, one line, soon, and in little memory.

Every run draws a new seed; JFLASH_FUZZ_SEED draws that one again (it is in the failure's message),
JFLASH_FUZZ_ONLY=N only its Nth case, and JFLASH_FUZZ_TIMES=N makes N times as many. A mutation that
changes nothing that matters loads: then the case is passed as well.
"""

import contextlib
import copy
import json
import os
import random
import resource
import secrets
import shutil
import signal
import struct
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jflash.io import configure_pair, encode_prompt, load_tokenizer, stop_token_ids
from jflash.io.hf_config import TARGETS, target_config
from jflash.io.quantised.scheme import quantisation, scheme_of
from jflash.memory import check_decoding
from tests.support.gguf_files import TOKENS, metadata, sentencepiece, write_gguf
from tests.support.quantised_files import CASES
from tests.support.small_checkpoints import Folders, make_pair

SEED = int(os.environ.get("JFLASH_FUZZ_SEED", secrets.randbits(32)))
ONLY = os.environ.get("JFLASH_FUZZ_ONLY")
TIMES = int(os.environ.get("JFLASH_FUZZ_TIMES", 1))
SECONDS, GROWTH = 20, 2**30  # of a case
PAGE = resource.getpagesize()
HOSTILE = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 299, 1000, 1024, 1025, 2**31 - 1, 2**31, 2**63, 2**64),
    *(2**70, 10**30, 0.5, -0.0, 1e-300, 1e308, float("inf"), float("nan"), "", "a", "2", "a\nb"),
    *("\ud800", "../x", "/dev/zero", "model.safetensors", "a\0b", "x" * 5000, [], {}, [None]),
    *([[1]], [1, "2"], ["a\nb"], [0] * 3000, {"a": 1}, {"a": {"b": [1]}}, [[[]]]),
]
NAMES = [
    "num_hidden_layers",
    "head_dim",
    "num_experts",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "is_causal",
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "quantization_config",
    "dflash_config",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "tie_word_embeddings",
    "attention_bias",
    "hidden_act",
    "partial_rotary_factor",
    "eos_token_id",
    "max_window_layers",
    "architectures",
    "model_type",
    "auto_map",
    "added_tokens_decoder",
    "chat_template",
    "tokenizer_class",
    "extra_special_tokens",
    "weight_map",
    "factor",
    "rope_type",
    "original_max_position_embeddings",
    "attention_factor",
    "truncate",
    "mscale",
    "beta_fast",
    "final_logit_softcapping",
    "per_layer_config",
    "rotary_dim",
    "compression_config",
    "text_config",
    "data_offsets",
    "shape",
    "dtype",
    "__metadata__",
    "num_key_value_heads",
]


class Watched(BaseException):
    """Raised inside a case that takes too long or too much: no `except Exception` hides it."""


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Interrupts what takes too long or too much memory."""
    begin, before = time.monotonic(), memory()

    def look(*_: Any) -> None:
        if time.monotonic() - begin > SECONDS:
            raise Watched(f"longer than {SECONDS} seconds")
        if memory() - before > GROWTH:
            raise Watched(f"{(memory() - before) / 2**30:.1f} GB more memory")

    handler = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.25, 0.25)
    try:
        yield
        look()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def fuzz(count: int, case: Callable[[random.Random], Callable[[], Any]]) -> None:
    """`case` makes the files of a mutation and gives what reads them."""
    refused, count = 0, count * TIMES
    for index in range(count) if ONLY is None else [int(ONLY)]:
        rng = random.Random(f"{SEED}/{index}")
        read = case(rng)
        wrong = None
        try:
            with watched(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read()
        except (ValueError, OSError) as error:
            refused += 1
            if len(str(error).splitlines()) != 1:
                wrong = f"more than a line: {str(error)!r}"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            wrong = "".join(traceback.format_exception(error)[-6:])
        assert wrong is None, f"JFLASH_FUZZ_SEED={SEED} JFLASH_FUZZ_ONLY={index}: {wrong}"
    assert ONLY is not None or refused > count // 16, f"{refused} of {count} refused, seed {SEED}"


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place of a JSON value as its container and key."""
    found = []
    for key in value if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += places(value[key])
    return found


def mutated(rng: random.Random, value: dict[str, Any]) -> dict[str, Any]:
    """A copy with one to three places changed, removed or added."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        everywhere = places(value)
        if not everywhere or rng.random() < 0.15:
            value[rng.choice(NAMES)] = copy.deepcopy(rng.choice(HOSTILE))
            continue
        container, key = rng.choice(everywhere)
        old, act = container[key], rng.random()
        if act < 0.1 and isinstance(container, dict):
            del container[key]
        elif act < 0.2 and isinstance(container, dict):
            container[rng.choice(NAMES)] = container.pop(key)
        elif act < 0.35 and type(old) in (int, float):
            container[key] = rng.choice([old + 1, old - 1, -old, old * 2, old * 1000, float(old)])
        else:
            container[key] = copy.deepcopy(rng.choice(HOSTILE))
    return value


def broken(rng: random.Random, data: bytes) -> bytes:
    """Bytes flipped, removed or repeated; seldom nested too deep."""
    act = rng.random()
    if act < 0.02:
        return b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    at = rng.randrange(max(1, len(data)))
    if act < 0.4:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if act < 0.6:
        return data[:at]
    end = min(len(data), at + rng.randrange(1, 40))
    return data[:at] + (data[end:] if act < 0.8 else data[at:end] * 2 + data[end:])


def as_file(rng: random.Random, value: dict[str, Any]) -> bytes:
    """A mutation of a JSON file: mostly still JSON."""
    text = json.dumps(mutated(rng, value) if rng.random() < 0.85 else value)
    return text.encode() if rng.random() < 0.85 else broken(rng, text.encode())


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Folders:
    return make_pair(tmp_path_factory.mktemp("pair"))


def check(target: Path, drafter: Path | None) -> None:
    """All that a command asks of two checkpoints before it reads a weight."""
    files = configure_pair(target, drafter)
    check_decoding(files.models, 1, 2, 4)
    files.target.check(files.models.target.config)
    if files.drafter is not None and files.models.drafter is not None:
        files.drafter.check(files.models.drafter.config)


def other(folder: Path, name: str, content: bytes) -> Path:
    """A folder of the same files but for one; the others are linked."""
    copied = folder.with_name(f"{folder.name}-{name}")
    if not copied.exists():
        copied.mkdir()
        for file in folder.iterdir():
            if file.name != name:
                (copied / file.name).symlink_to(file)
    (copied / name).write_bytes(content)
    return copied


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_configs(pair, which):
    whole = json.loads((getattr(pair, which) / "config.json").read_text())

    def case(rng: random.Random) -> Callable[[], Any]:
        family = {"architectures": [rng.choice(ARCHITECTURES)]} if rng.random() < 0.5 else {}
        raw = whole | (family if which == "target" else {})
        folder = other(getattr(pair, which), "config.json", as_file(rng, raw))
        if which == "target":
            return lambda: check(folder, rng.choice([None, pair.drafter]))
        return lambda: check(pair.target, folder)

    fuzz(240, case)


def test_configs_of_all_families():
    """Every recorded pair's target, quantised in each way that is read."""
    cases = sorted(Path(__file__).parents[1].glob("reference/cases/*/target/config.json"))
    wholes = [json.loads(file.read_text()) for file in cases]
    assert {name for raw in wholes for name in raw["architectures"]} >= set(TARGETS)
    ways = [{"quantization_config": case.config} for case in CASES.values()]

    def case(rng: random.Random) -> Callable[[], Any]:
        raw = mutated(rng, rng.choice(wholes) | rng.choice([{}, *ways]))

        def read() -> None:
            found = quantisation(raw)
            if found is not None:
                scheme_of(found)
            target_config(raw)

        return read

    fuzz(800, case)


ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM")


def test_safetensors_headers(pair):
    data = (pair.target / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])

    def case(rng: random.Random) -> Callable[[], Any]:
        made = as_file(rng, header)
        length = len(made) if rng.random() < 0.9 else rng.choice([0, 2**31, 2**60, 2**64 - 1])
        tensors = data[8 + size :] if rng.random() < 0.9 else broken(rng, data[8 + size :])
        content = struct.pack("<Q", length) + made + tensors
        folder = other(pair.target, "model.safetensors", content)
        return lambda: check(folder, None)

    fuzz(400, case)


def test_indexes(pair, tmp_path):
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(4)]
    one = "model-00001-of-00001.safetensors"
    source = shutil.copytree(pair.target, tmp_path / "target")
    (source / "model.safetensors").rename(source / one)  # which would come before an index
    index = {"metadata": {"total_size": 5}, "weight_map": dict.fromkeys(names, one)}

    def case(rng: random.Random) -> Callable[[], Any]:
        folder = other(source, "model.safetensors.index.json", as_file(rng, index))
        return lambda: check(folder, None)

    fuzz(200, case)


def test_generation_configs(pair):
    raw = {"eos_token_id": [256, 3], "temperature": 0.6, "_from_model_config": True}

    def case(rng: random.Random) -> Callable[[], Any]:
        folder = other(pair.target, "generation_config.json", as_file(rng, raw))
        return lambda: stop_token_ids(folder)

    fuzz(240, case)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
def test_tokenizers(pair, name):
    raw = json.loads((pair.target / name).read_text())

    def case(rng: random.Random) -> Callable[[], Any]:
        folder = other(pair.target, name, as_file(rng, raw))
        return lambda: encode_prompt(load_tokenizer(folder), "hi")

    fuzz(100, case)


GGUF = (None, True, 0, 1, 7, 2**31, 2**32 - 1, 0.5, float("inf"), float("nan"), "", "a", "2")
GGUF += ([1], ["a"], [0.5], [1, 2, 3], ["a b"], ["a"] * 320, [7] * 320, [1.5] * 320)


def test_gguf_metadata(tmp_path):
    whole = {kind: metadata("llama") | own for kind, own in (("b", {}), ("s", sentencepiece()))}

    def case(rng: random.Random) -> Callable[[], Any]:
        keys = whole[rng.choice("bs")]
        more = {rng.choice([*keys, "general.alignment", "split.count"]): rng.choice(GGUF)}
        if rng.random() < 0.3:
            more |= {rng.choice(list(keys)): rng.choice(GGUF)}
        file = write_gguf(tmp_path / "m.gguf", change=keys | more)
        return lambda: (stop_token_ids(file), load_tokenizer(file), check(file, None))

    fuzz(100, case)


def test_gguf_headers(tmp_path):
    data = write_gguf(tmp_path / "whole.gguf").read_bytes()
    end = data.index(TOKENS[-1].encode()) + 2000
    numbers = [at for at in range(8, end) if data[at : at + 8].count(0) >= 6]

    def case(rng: random.Random) -> Callable[[], Any]:
        made = bytearray(data)
        if rng.random() < 0.5:  # a count, a length, a type
            at, width = rng.choice(numbers), rng.choice([4, 8])
            value = rng.choice([0, 1, 9, 2**20, 2**31, 2**32 - 1, 2**40, 2**62, 2**64 - 1])
            made[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
        else:
            made = broken(rng, bytes(made[:end])) + made[end:]
        file = tmp_path / "m.gguf"
        file.write_bytes(made)
        return lambda: (check(file, None), stop_token_ids(file), load_tokenizer(file))

    fuzz(200, case)
