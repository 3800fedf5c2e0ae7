"""What `jflash serve` decides before it listens: its keys, and the pages that its memory holds."""

import argparse
import functools
import os
import socket
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jflash.cli import serve, served
from jflash.compiled.shape import Shape
from jflash.io import configure_pair
from jflash.memory import memory_budget, tree_bytes
from jflash.server.run import listen, open_to_clients, url_of
from jflash.serving.calls.constrained import decide, kept_bytes, look, undrafted
from jflash.serving.calls.layout import Layout, settled, steps_of_call
from jflash.serving.calls.packing import mask_words
from jflash.serving.calls.slots import empty_state
from jflash.serving.calls.some_slots import places
from jflash.serving.calls.steps import of_all_kinds
from jflash.serving.paging.room import needed
from jflash.system.embedded import EMBEDDED_PAIR
from pallas_kernels.block_attention import PAGE
from tests.support.pairs import one_arithmetic, random_pair


def test_pages_fit_into_the_memory_or_are_refused(monkeypatch):
    models = configure_pair(EMBEDDED_PAIR / "target", EMBEDDED_PAIR / "drafter").models
    columns = 1024 // PAGE
    need = needed(models, Shape.of(4, 1024))
    assert need.weights == memory_budget(models, Shape.of(4, 1024)).weights
    state = empty_state(models, Layout(Shape.of(4, 1024), 40, 1))
    assert (
        need.of(40) - need.of(3)
        == 37 * need.page
        == 37
        * tree_bytes(
            [x[0] for layer in (*state.target_cache, *state.drafter_cache) for x in layer[:2]]
        )
    )

    def pages(limit: int | None, given: int | None = None) -> int:
        monkeypatch.setattr(served, "device_memory", lambda: limit)
        options = argparse.Namespace(pages=given, max_batch=4, steps_per_call=None, states=None)
        return served._pages(options, models, 1024)

    assert pages(None) == pages(need.of(4 * columns)) == 4 * columns
    assert pages(None, given=7) == 7
    assert pages(need.of(21)) == pages(need.of(21), given=21) == 21
    with pytest.raises(ValueError, match=r"22 pages do not fit: .* there is room for 21 pages"):
        pages(need.of(22) - 1, given=22)
    with pytest.raises(ValueError, match=rf"1024 tokens needs {columns} pages: .* for 15 pages"):
        pages(need.of(columns) - 1)
    with pytest.raises(ValueError, match="for 0 pages"):
        pages(need.weights - 1)


def test_pages_of_windows_have_room_for_what_a_call_may_commit():
    """The state is the engine's, to the byte."""
    models = random_pair(sights=({"window": 40}, {"window": None})).models
    shape = Shape.of(4, 1024, chunk=64)
    budget = memory_budget(replace(models, sampled=True), shape)
    layout = settled(models, Layout(shape, 40, steps_of_call(models)))
    state = jax.eval_shape(lambda: empty_state(models, layout))
    kept = kept_bytes(models, layout)
    parts = (budget.weights, budget.temporaries, tree_bytes(state), kept)
    assert needed(models, shape).of(40) == sum(parts)


@pytest.mark.parametrize(("rule", "rows"), [("greedy", None), ("sampled", 12)])
def test_what_the_programs_of_a_grammar_hand_on(rule, rows):
    """To the byte what their shapes say."""
    pair = one_arithmetic(random_pair())
    models = replace(pair.models, draft_rule=rule, rows=rows)
    layout, draws = Layout(Shape.of(4, 256, chunk=64), 16, 1, ahead=2), of_all_kinds(models, 4)
    state, slots = empty_state(models, layout), places([5, 2], 4, layout)
    table, who = np.zeros((4, 4), np.int32), np.ones((3, 4), bool)
    drafted, of = jax.eval_shape(lambda: undrafted(models, 6)), functools.partial
    given = (pair.params, state, table, slots, who)
    _, waiting, seen = jax.eval_shape(of(look, draws), *given, drafted)
    masks = np.zeros((4, models.block_size, mask_words(models)), np.int32)
    _, following, drafts, _ = jax.eval_shape(of(decide, draws), *given, waiting, seen, masks)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert shapes(drafted) == shapes(waiting) == shapes(following)
    assert drafts.shape == (4, models.block_size - 1)
    assert kept_bytes(models, layout) == tree_bytes((drafted, seen, masks))


def test_keys_come_from_options_a_file_and_the_environment(monkeypatch, tmp_path):
    def keys(file: str | None) -> list[str]:
        return served.api_keys(argparse.Namespace(api_key=[" a"], api_key_file=file))

    file = tmp_path / "keys"
    file.write_text("b\n\n c \n")
    monkeypatch.delenv("JFLASH_API_KEY", raising=False)
    assert keys(None) == ["a"]
    monkeypatch.setenv("JFLASH_API_KEY", "d\n")
    assert keys(str(file)) == ["a", "b", "c", "d"]
    file.write_text("b\n\n c \n", encoding="utf-8-sig")
    assert keys(str(file)) == ["a", "b", "c", "d"]
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no key"):
        keys(str(file))
    file.write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match=f"--api-key-file {file} is no text in UTF-8"):
        keys(str(file))
    with pytest.raises(ValueError, match=f"--api-key-file {tmp_path}/none: No such file"):
        keys(f"{tmp_path}/none")
    monkeypatch.setenv("JFLASH_API_KEY", "\n")
    with pytest.raises(ValueError, match=r"JFLASH_API_KEY '\\n' holds no key"):
        keys(None)


WRONG = [
    *("--port -1", "--port 65536", "--states -1", "--pages 0", "--steps-per-call 0"),
    *("--max-context 0", "--max-batch 0", "--max-queue 0"),
    *("--max-body 0", "--request-timeout 0", "--request-timeout nan", "--shutdown-timeout -1"),
    *("--hang-timeout inf", "--hang-timeout 1e10", "--replicas 0", "--max-replicas 0"),
    *("--temperature -1", "--top-k -1", "--top-p 2", "--min-p 2", "--draft-rule odd"),
    *("--reasoning maybe", "--api-key-file none", "--api-key", "--api-key  ", "--port x"),
    *("--served-model-name", "--served-model-name  "),
    *("--allow-origin page.example", "--allow-origin https://page.example/", "--allow-origin"),
]


def test_each_request_of_a_fleet_has_its_line_in_the_log(monkeypatch):
    """Ray reads the variable when it is imported."""
    seen = list[str | None]()
    fleet = SimpleNamespace(serve_replicas=lambda _: seen.append(os.environ.get("RAY_DEDUP_LOGS")))
    monkeypatch.setitem(sys.modules, "jflash.serving.ray_run", fleet)
    monkeypatch.setattr(serve, "require", lambda *_: None)
    monkeypatch.setenv("RAY_DEDUP_LOGS", "1")  # a user's own is kept, and comes back after the test
    serve.run(argparse.Namespace(replicas=2))
    monkeypatch.delenv("RAY_DEDUP_LOGS")
    serve.run(argparse.Namespace(replicas=2))
    assert seen == ["1", "0"]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_value_of_an_option_is_refused_by_its_name(refused, wrong):
    """Those without a value are empty."""
    option, _, value = wrong.partition(" ")
    seconds = ["below 1e9"] if option.endswith("-timeout") else []  # 1e10 is above 0
    refused(["--port", "0", option, value], option, *seconds, command="serve")


def test_a_port_is_one_servers_from_before_it_loads_until_it_ends():
    """The next one has it at once, though the last connection's end is remembered."""
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        taken = pytest.raises(ValueError, match=f"--port {port}: Address already in use")
        with taken:
            listen("127.0.0.1", port)
        open_to_clients(first)
        with socket.create_connection(("127.0.0.1", port)):
            first.accept()[0].close()
    with socket.socket() as early, socket.socket() as late:  # of servers that keep no port
        for each in (early, late):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", port))
        open_to_clients(early)
        with taken:
            open_to_clients(late)
    with listen("127.0.0.1", port) as following:
        open_to_clients(following)


def test_the_host_of_a_server_can_be_opened_as_it_is_printed():
    assert url_of("127.0.0.1", 8000) == "http://127.0.0.1:8000"
    assert url_of("::1", 8000) == "http://[::1]:8000"


def test_what_a_port_and_a_model_cannot_give_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port}: Address already in use"):
            listen("127.0.0.1", port)
    models = configure_pair(EMBEDDED_PAIR / "target", EMBEDDED_PAIR / "drafter").models
    asked = lambda most: served.context_of(argparse.Namespace(max_context=most), models)  # noqa: E731
    template = lambda mode, source: served.template_of(  # noqa: E731
        argparse.Namespace(reasoning=mode), argparse.Namespace(chat_template=source)
    )
    assert asked(None) == asked(2048) == 2048 and asked(2) == 2
    with pytest.raises(ValueError, match="--max-context 2049 passes the model's 2048 positions"):
        asked(2049)
    with pytest.raises(ValueError, match="--max-context 1 has no room"):
        asked(1)
    for source in (None, "{{ messages }}", {"default": "{{ messages }}"}):
        with pytest.raises(ValueError, match="--reasoning on: the chat template has no enable_th"):
            template("on", source)
    assert template("off", None) == "" and template("on", {"a": "x", "b": "enable_thinking"})
