"""bench-serving: what is replayed is what was recorded, through the real engine."""

import functools
import json
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.bench.serving import beside_form as beside_form_module
from jflash.bench.serving import cases as serving_cases
from jflash.bench.serving import stalls, steady
from jflash.bench.serving.cases import engine_for, layout_of, random_pair
from jflash.bench.serving.http_clients import counted
from jflash.bench.serving.recording import of_mean, read_recording, recorded
from jflash.bench.serving.stalls import gaps
from jflash.cli import bench_serving, main
from jflash.compiled.shape import Shape, new_state
from jflash.records.decoding import Decoding
from jflash.serving.request import Request
from jflash.speculative import draft
from jflash.system.locks import in_turn
from tests.support.small_checkpoints import edit_config, make_pair
from tests.support.virtual_devices import start

STEPS = [[0, 0.5, *[0.3] * 6], [7, *[0.9] * 7], [3, 0.9, 0.8, 0.7, *[0.2] * 4], [1, *[0.6] * 7]]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A recording of blocks of 8, as the tiny shape has them."""
    file = tmp_path_factory.mktemp("replay") / "steps.json"
    file.write_text(json.dumps({"steps": STEPS}))
    return file


def test_rows_of_the_table(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(steady, "LEAST", 0)
    monkeypatch.setattr(serving_cases, "NEW", new := 64)
    kept = tmp_path / "result.json"
    argv = ["--shape", "tiny", "--replay", str(file), "--batch", "2", "--repeats", "1"]
    argv += ["--in-turn", str(tmp_path / "turn"), "--drafter-dtype", "float8", "--requests", "1,4"]
    argv += ["--texts", "1"]
    assert main.run("bench-serving", [*argv, "--dtype", "float32", "--json", str(kept)]) == 0
    result = json.loads(kept.read_text())
    assert result["drafter_dtype"] == "float8"
    row, longer, few = result["serving"]
    assert (row["requests"], row["new_tokens"]) == (2, 2 * new)
    assert (longer["requests"], longer["new_tokens"]) == (8, 8 * new)
    assert (few["requests"], few["new_tokens"], few["live"]) == (1, new, 1)
    between = longer["steady"]  # from the second text's end to about the sixth's
    assert "steady" not in row and 2 * new < between["new_tokens"] < 7 * new
    assert 0 < between["seconds"] < longer["seconds"] and 1 < between["live"] <= 2
    assert f"{between['tokens_per_second']:,.0f} between its ends" in capsys.readouterr().out
    assert row["tau"] == pytest.approx(result["replayed_tau"], abs=0.15)  # the last block is cut
    assert 0 <= row["device_busy_seen"] <= row["device_busy"] < 1.05


@pytest.mark.long
def test_a_long_prompt_keeps_a_text_waiting(file, tmp_path, monkeypatch):
    monkeypatch.setattr(stalls, "ALONE", 0.1)
    monkeypatch.setattr(bench_serving, "TEXTS", 1)
    kept = tmp_path / "result.json"
    argv = ["--shape", "tiny", "--replay", str(file), "--long-prompt", "1024", "--repeats", "1"]
    assert main.run("bench-serving", [*argv, "--dtype", "float32", "--json", str(kept)]) == 0
    [row] = json.loads(kept.read_text())["serving"]
    assert (row["texts"], row["prompt_tokens"]) == (1, 1024)
    assert 0 < row["alone"]["p50_ms"] <= row["alone"]["most_ms"]
    assert row["stall_ms"] == row["beside"]["most_ms"] - row["alone"]["p50_ms"]


@pytest.fixture
def beside_form(tmp_path):
    """The arguments that time one text of a small pair beside one in a form."""
    pair = make_pair(tmp_path)
    for folder in pair:
        edit_config(folder, max_position_embeddings=1000)
    questions = tmp_path / "questions.jsonl"
    texts = ("Ana has 3 shells. How many?", "Theo has 9 stamps and 2 more. How many?")
    lines = [json.dumps({"question": text, "answer": "#### 3"}) for text in texts]
    questions.write_text("\n".join(lines))
    argv = ["--target", f"{pair.target}", "--drafter", f"{pair.drafter}"]
    argv += ["--gsm8k", str(questions), "--questions", "2", "--beside-form", "2"]
    return [*argv, "--max-new-tokens", "24", "--repeats", "1"]


def test_texts_beside_one_in_a_form(beside_form, tmp_path):
    """Neighbours keep their texts, and what they lose is told."""
    kept = tmp_path / "result.json"
    assert main.run("bench-serving", [*beside_form, "--json", str(kept)]) == 0
    [row] = json.loads(kept.read_text())["serving"]
    assert (row["what"], row["neighbours"], row["new_tokens"]) == ("beside a form", 1, 24)
    assert row["differ"] == 0
    alone = row["beside_plain"]
    assert row["kept"] == row["tokens_per_second"] / alone["tokens_per_second"]
    assert all(1 < one["live"] <= 2 for one in (row, alone))


def test_a_text_in_a_form_may_not_end_before_its_neighbours(beside_form, monkeypatch, capsys):
    measured = beside_form_module._measured

    def of_one_token(engine, asked, form, most, *sizes):
        return measured(engine, asked, form, 1, *sizes)

    monkeypatch.setattr(beside_form_module, "_measured", of_one_token)
    assert main.run("bench-serving", beside_form) == 2
    assert "the text in a form ended before its neighbours: length" in capsys.readouterr().err


def test_a_recording_that_could_not_be_written_is_refused_first(tmp_path, capsys):
    """Before the pair is read; --overwrite is of --json alone."""
    there = tmp_path / "there.json"
    there.write_text("kept")
    argv = ["--target", "nowhere", "--drafter", "nowhere", "--gsm8k", "nowhere", "--record"]
    for place, why in [(there, "already: give another"), (tmp_path / "no/x", "cannot write")]:
        assert main.run("bench-serving", [*argv, str(place)]) == 2
        assert why in capsys.readouterr().err
    assert there.read_text() == "kept"


def test_gaps_are_between_calls_and_some_part_of_them_is_in_the_span():
    times = [0.0, 1.0, 1.0001, 1.5, 3.0, 4.0]
    assert gaps(times, 1.2, 2.0) == [1.5 - 1.0001, 1.5]
    assert gaps(times, 0.0, 9.0) == [1.0, 1.5 - 1.0001, 1.5, 1.0]


def test_commands_of_a_file_are_timed_one_after_another(tmp_path):
    """The first waits for the second, which compiles, and the third for the first to end."""
    done, file = list[str](), tmp_path / "turn"

    def third():
        with in_turn(file):
            done.append("third begins")

    def first(wait):
        wait()
        done.append("first is timed")

    with in_turn(file) as wait:
        with in_turn(file):
            timed = threading.Thread(target=first, args=[wait])
            timed.start()
            timed.join(0.2)
            done.append("second ends")
        timed.join()
        late = threading.Thread(target=third)
        late.start()
        late.join(0.2)
        done.append("first ends")
    late.join()
    assert done == ["second ends", "first is timed", "first ends", "third begins"]


def test_each_text_walks_through_the_recorded_steps(file):
    """Every step accepts as many drafts as the recorded one that its anchor names."""
    pair = random_pair("tiny", read_recording(file), "float32")
    taken = [step[0] + 1 for step in STEPS]
    with engine_for(pair, layout_of(2, 768, 2), 8) as engine:
        found = engine.generate(Request(prompt_ids=[i, 7, 9], max_tokens=60) for i in range(3))
    for result in found:
        first = result.token_ids[0] % len(STEPS)
        walk = [taken[(first + i) % len(STEPS)] for i in range(len(result.acceptance_lengths))]
        assert result.acceptance_lengths[:-1] == walk[:-1]


def test_confidences_are_the_recorded_ones(file):
    drafter = random_pair("tiny", read_recording(file), "float32").models.drafter
    assert drafter is not None
    best, sure = jnp.full((4, 7), 3), jnp.full((4, 7), 0.25)
    drafted, recorded = drafter.surest(jnp.arange(4), best, sure)
    np.testing.assert_array_equal(recorded, np.float32([step[1:] for step in STEPS]))
    assert len(set(np.asarray(drafted).flat)) > 20  # of 512: texts are no repetitions
    kept = drafter.surest(jnp.arange(4), best - 4, sure)  # no id of the head is below 0
    np.testing.assert_array_equal(kept, (best - 4, sure))  # so its product is read


def test_rows_are_ranked_by_the_recorded_confidences(file):
    pair = random_pair("tiny", read_recording(file), "float32")
    models, shape = replace(pair.models, rows=5), Shape.of(2, 256)
    state = new_state(models, shape)
    state = state.with_sequences(tokens=state.sequences.tokens.at[:, 0].set(jnp.array([1, 2])))
    proposal = jax.jit(functools.partial(draft, models))(pair.params, state)[0]
    np.testing.assert_allclose(proposal.confidence, [STEPS[1][1:], STEPS[2][1:]], atol=1e-3)


@pytest.mark.long
def test_devices_that_share_a_pair_replay_with_chosen_rows(file, tmp_path):
    kept = tmp_path / "result.json"
    argv = ["--shape", "tiny", "--replay", str(file), "--auto-batch", "8", "--repeats", "1"]
    argv += ["--tensor-parallel", "2", "--dtype", "float32", "--json", str(kept)]
    program = "import sys; from jflash.cli import main; "
    program += "sys.exit(main.run('bench-serving', sys.argv[1:]))"
    run = start(program, *argv)
    _, errors = run.communicate(timeout=600)
    assert run.returncode == 0, errors
    found = json.loads(kept.read_text())
    [row] = found["serving"]
    assert found["tensor_parallel"] == 2 and row["rows"] == "auto"
    assert sum(row["steps_by_rows"].values()) > 0 and len(row["steps_by_rows"]) > 1
    assert 1 < row["tau"] < 1 + max(step[0] for step in STEPS)


def test_what_is_replayed_is_recorded_again(file):
    """Three answers, two at once: a step for each whole block, the last without room left out."""
    pair, prompts = random_pair("tiny", read_recording(file), "float32"), [[5, 7], [6, 9, 8], [3]]
    answers = recorded(pair, prompts, Decoding(max_new_tokens=40), at_once=2)
    assert len(answers) == 3
    for steps in answers:
        assert 33 <= 1 + sum(step[0] + 1 for step in steps) <= 40
        first = [step[0] for step in STEPS].index(steps[0][0])
        walk = [STEPS[(first + i) % len(STEPS)] for i in range(len(steps))]
        np.testing.assert_allclose(steps, walk, atol=2e-3)


def test_recorded_answers_have_the_wanted_mean():
    slow, fast = [[0, 0.5]] * 4, [[9, 0.5]] * 2
    assert of_mean([slow, [], fast], 4.0) == [fast, slow]
    assert of_mean([slow, fast], 4.1) == [fast]
    with pytest.raises(ValueError, match=r"no answer commits 10\.5"):
        of_mean([slow, fast], 10.5)


@pytest.mark.parametrize("text", ["{}", '{"steps": [[1, 0.5], [0]]}', '{"steps": [[2, 0.5]]}'])
def test_a_file_that_is_no_recording_is_refused(text, tmp_path, capsys):
    file = tmp_path / "steps.json"
    file.write_text(text)
    assert main.run("bench-serving", ["--shape", "tiny", "--replay", str(file)]) == 2
    assert f"{file} is no recording" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--shape tiny --replay r --questions 3", "--questions without --target"),
        ("--shape tiny --replay r --probes 3", "--probes without --first-token"),
        ("--target t --drafter d --gsm8k g --requests 2", "--requests without --shape"),
        ("--shape tiny --replay r --batch 2 --texts 1,2", "--texts 2: no --batch or --auto-batch"),
        ("--target t --drafter d --gsm8k g --tau 3", "--tau without --record"),
        ("--shape tiny-dflash2 --replay r --auto-batch 8", "tiny-dflash2's drafter reads logits"),
        ("--target t --drafter d --gsm8k g --record r --clients 2", "--clients with --record"),
    ],
)
def test_options_that_nothing_reads_are_refused(options, why, capsys):
    assert main.run("bench-serving", options.split()) == 2
    assert why in capsys.readouterr().err


def test_a_stream_is_counted_by_its_usage_and_must_end():
    chunk, usage = b'data: {"choices": [{}]}\n\n', b'data: {"usage": {"completion_tokens": 9}}\n\n'
    assert counted(chunk * 3 + usage + b"data: [DONE]\n\n") == (9, 3)
    with pytest.raises(ValueError, match="without an end"):
        counted(chunk * 3)
