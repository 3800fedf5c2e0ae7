"""What an answer says and whether it is right, programs under limits, and what many amount to."""

import itertools
import json
import subprocess
import tempfile
import time

import math_verify
import pytest
from scipy.stats import binomtest

from jflash.evals import answer_check
from jflash.evals.answer_check import check_answer, extract_answer, is_equal
from jflash.evals.code_execution import LIMITS, passes, program
from jflash.evals.datasets import Problem
from jflash.evals.evaluation import execute_all, executed, said
from jflash.evals.report import table
from jflash.evals.summary import (
    accuracy,
    by_position,
    by_progress,
    compare,
    speed,
    summarise,
    wilson,
)
from jflash.generate import Generation, Seconds


@pytest.mark.parametrize(
    ("text", "answer", "rule"),
    [
        (r"\boxed{1} so \boxed{\frac{3}{4}} and 5", r"\frac{3}{4}", "boxed"),
        (r"#### 7 then \boxed{8", "7 then \\boxed{8", "hashes"),
        ("#### 6\n#### $1,200\nbye", "$1,200", "hashes"),
        ("#### Step 1: 3 eggs\nThat makes 18.", "18", "last number"),
        ("#### 2. The sum\nIt is 18.", "18", "last number"),
        ("#### Final Answer\n\n**18**", "18", "last number"),
        ("#### Final answer: **18**\n\nThat is 3 more.", "Final answer: **18**", "hashes"),
        ("#### \\frac{1}{2}\nbye 3", r"\frac{1}{2}", "hashes"),
        ("so 3\n#### Monday\n", "Monday", "hashes"),
        ("3 eggs, 4 hens, so -1,234.50.", "-1,234.50", "last number"),
        (r"\boxed{} 9", "9", "last number"),
        ("none at all", None, "none"),
        ("It takes 18-20 days", "20", "last number"),
        ("from 20 to -18 degrees", "-18", "last number"),
        ("that is £18.", "£18", "last number"),
        ("so it is \u221218.", "\u221218", "last number"),
        ("it costs $.50.", "$.50", "last number"),
        ("so many...5", "5", "last number"),
        ("The answer is 1 000.", "1 000", "last number"),
        (r"it is $1{,}000$.", "$1{,}000", "last number"),
        ("it is 1'000 francs", "1'000", "last number"),
        ("there are 12 100-page books", "100", "last number"),
        ("in 2010 150 more", "150", "last number"),
        ("it costs $2 million dollars", "$2 million", "last number"),
        ("it costs $2M.", "$2M", "last number"),
        ("a run of 5k", "5", "last number"),
        ("The answer is 12:05.", "12:05", "last number"),
        ("3:4, so 3:4:7", "3:4:7", "last number"),
        ("Total:18", "18", "last number"),
        (r"so 2 \times 10^6.", r"2 \times 10^6", "last number"),
        ("so x^18", None, "none"),
        ("that is 18 cm^2", "18", "last number"),
        (r"\boxed{\boxed{7}}", "7", "boxed"),
        (r"} \boxed{ \frac{1}{2} } }", r"\frac{1}{2}", "boxed"),
    ],
)
def test_the_answer_is_found_by_a_named_rule(text, answer, rule):
    assert extract_answer(text) == (answer, rule)


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        (r"\boxed{18}", "18", True),
        (r"\boxed{18\text{ dollars}}", "18", True),
        ("#### $1,800.00", "1800", True),
        ("#### 18 eggs a day.", "18", True),
        ("#### **18**", "18", True),
        ("#### **$18**.", "18", True),
        ("#### £18", "18", True),
        ("#### -£18", "-18", True),
        ("#### 18 €", "18", True),
        (r"\boxed{£18}", "18", True),
        (r"\boxed{\$1,800}", "1800", True),
        (r"\boxed{\text{18 apples}}", "18", True),
        (r"\boxed{\text{Monday}}", r"\text{Monday}", True),
        (r"\boxed{\text{Monday}}", r"\text{Friday}", False),
        ("#### 18/day", "18", True),
        ("#### 18 cm^2", "18", True),
        ("#### 18 miles/hour", "18", True),
        ("#### 18 t-shirts", "18", True),
        ("#### 18 one-gallon jugs.", "18", True),
        ("#### 18 students' books", "18", True),
        ("#### 18 o\u2019clock", "18", True),
        ("#### 18 - x", "18", False),
        ("#### 1/2 cup", "0.5", True),
        ("#### 1/2 cup", "1", False),
        (r"\boxed{18 \text{ m}}", "18", True),
        (r"\boxed{3 x}", "3x", True),
        (r"\boxed{3 y}", "3x", False),
        (r"\boxed{1\,000}", "1000", True),
        (r"\boxed{1\,000}", "1", False),
        (r"\boxed{2\,5}", "25", False),
        (r"\boxed{1 000}", "1000", True),
        (r"\boxed{1 000}", "0", False),
        (r"\boxed{\$12 345 678.50}", "12345678.5", True),
        ("#### 1\u00a0000 apples", "1,000", True),
        (r"\boxed{1 125/1000}", "1125/1000", False),
        ("The answer is 1 000.", "1000", True),
        ("The answer is 1 000.", "0", False),
        (r"it is 1{,}000.", "1000", True),
        ("it is 1'000 francs", "1000", True),
        ("it is 1_000", "1000", True),
        ("#### 2 million", "2000000", True),
        ("#### 2 million", "2", False),
        ("#### $1.5 million dollars", "1,500,000", True),
        ("#### -1/2 thousand", "-500", True),
        ("#### 1/0 million", "0", False),
        (r"\boxed{2\text{ million}}", "2000000", True),
        (r"\boxed{2\text{ million}}", "2", False),
        ("it costs $2M.", "2000000", True),
        ("it costs $2M.", "2", False),
        ("The answer is 12:05.", "12:05", True),
        ("The answer is 12:05.", "5", False),
        ("#### 5 minutes", "5", True),
        ("#### $5 mugs", "5", True),
        (r"so 2 \times 10^6.", "2000000", True),
        (r"so 2 \times 10^6.", "6", False),
        ("that is 18 cm^2", "18", True),
        (r"\boxed{2 5}", "25", False),
        (r"\boxed{1000 000}", "1000000", False),
        ("#### 18/5", "18", False),
        ("#### **19**", "18", False),
        ("It takes 18-20 days", "20", True),
        (r"\boxed{0.5}", r"\frac{1}{2}", True),
        (r"\boxed{(3, \pi/2)}", r"\left( 3, \frac{\pi}{2} \right)", True),
        ("it is -18", "18", False),
        ("it is \u221218", "18", False),
        ("it is \u2212$18", "-18", True),
        ("it costs $.50", "50", False),
        ("it costs $.50", "0.5", True),
        (r"\boxed{19}", "18", False),
        (r"\boxed{18, 19}", "18", False),
        ("no number", "18", False),
    ],
)
def test_answers_are_compared_as_mathematics(text, gold, right):
    assert check_answer(text, gold).correct is right


def test_whole_numbers_are_compared_as_math_verify_compares_them():
    numbers = ["0", "-0", "7", "-7", "007", "1000", "1,000", "-1,000", "10000", "1,000,000", "70"]
    assert all(answer_check.WHOLE.fullmatch(number) for number in numbers)
    for gold, answer in itertools.product(numbers, repeat=2):
        right, given = (math_verify.parse(f"${number}$") for number in (gold, answer))
        assert is_equal(answer, gold) is math_verify.verify(right, given), (answer, gold)


@pytest.mark.parametrize("answer", ["1,2", "1,0000", "18.0", "1/2", "- 7", "", "3-4"])
def test_what_is_no_whole_number_is_left_to_math_verify(answer, monkeypatch):
    asked = []
    monkeypatch.setattr(math_verify, "verify", lambda *both, **_: bool(asked.append(both)))
    assert not is_equal(answer, "18") and len(asked) == 1


def test_a_comparison_that_would_take_for_ever_is_given_up():
    begin = time.perf_counter()
    assert not check_answer(r"\boxed{9^{9^{9^{9}}}}", "18").correct
    assert time.perf_counter() - begin < 30


@pytest.mark.parametrize(
    "text",
    [
        "#### " + "1" * 50_000,
        r"\boxed{" + "9" * 50_000 + "}",
        r"\boxed{" * 5_000,
        r"\boxed{" * 5_000 + "}" * 5_000,
        "#### " + "1,111." * 20_000,
        "#### " + "*" * 20_000,
        "#" * 50_000 + " " * 50_000,
        "#### answer \n" * 20_000 + "3",
        "#### " + "answer " * 10_000 + "\n3",
    ],
)
def test_a_long_answer_is_judged_soon(text):
    begin = time.perf_counter()
    assert not check_answer(text, "18").correct
    assert time.perf_counter() - begin < 1


HUMANEVAL = {
    "prompt": "import math\n\ndef half(x):\n    '''Half of x.'''\n",
    "entry_point": "half",
    "test": "def check(f):\n    assert f(3) == 1.5\n",
}
TOLD = HUMANEVAL | {
    "prompt": 'import math\n\ndef half(x):\n    """Half, as in\n    def half_of(x): ...\n    """\n'
}
MBPP = {"prompt": "Double a number.", "test_list": ["assert twice(2) == 4"]}


@pytest.mark.parametrize(
    ("dataset", "record", "text", "result"),
    [
        ("humaneval", HUMANEVAL, "    return x / 2\n", "passed"),
        ("humaneval", HUMANEVAL, "So:\n```python\ndef half(x):\n    return x / 2\n```", "passed"),
        ("humaneval", HUMANEVAL, "```python\ndef half(x):\n    return math.ceil(x)\n```", "failed"),
        ("humaneval", HUMANEVAL, "```\n1\n```\n```\ndef half(x):\n  return x / 2\n", "passed"),
        ("humaneval", HUMANEVAL, "I do not know.", "failed"),
        ("humaneval", TOLD, "```python\ndef half(x):\n    return x / 2\n```", "passed"),
        ("humaneval", TOLD, "    return math.fsum([x / 2])\n", "passed"),
        # A completion ends where the function does: the rest may be cut by the limit.
        ("humaneval", HUMANEVAL, "    return x / 2\n\ndef half(x):\n    return (", "passed"),
        # Another function whose name begins alike is not the one that is wanted.
        (
            "humaneval",
            HUMANEVAL,
            "```\ndef half_of(x):\n  return x\n```\n```\ndef half(x):\n  return x / 2\n```",
            "passed",
        ),
        ("mbpp", MBPP, "```python\ndef twice(x):\n    return 2 * x\n```", "passed"),
        # What an answer does as a script is not asked, as in the authors' harnesses.
        (
            "mbpp",
            MBPP,
            "def twice(x):\n    return 2 * x\nif __name__ == '__main__':\n    input()\n",
            "passed",
        ),
        ("mbpp", MBPP, "```python\ndef twice(x):\n    return x\n```", "failed"),
    ],
)
def test_programs_run_with_their_tests(dataset, record, text, result):
    assert passes(program(dataset, record, text)) == result


def test_thoughts_are_no_answer(tmp_path):
    """They hold first tries, of the code too; an answer that was cut in them stays as it is."""
    tried = "<think>\nSay\n```python\ndef twice(x):\n    return x\n```\nNo.\n</think>\n\n"
    text = tried + "```python\ndef twice(x):\n    return 2 * x\n```"
    problems, file = [Problem(0, ["Double."], None, MBPP)], tmp_path / "executed.jsonl"
    assert execute_all("mbpp", problems, [{"index": 0, "text": text}], file) == {0: "passed"}
    assert said("<think>\nIt is 7") == "<think>\nIt is 7"


def test_a_result_belongs_to_the_program_that_ran(tmp_path, capsys):
    """Whoever removes the answers alone gets other answers, and these have not run."""
    problems, file = [Problem(i, ["Double."], None, MBPP) for i in range(2)], tmp_path / "ran"
    wrong, right = ({"text": f"def twice(x):\n    return {n} * x"} for n in (3, 2))
    first = [wrong | {"index": 0}, right | {"index": 1}]
    assert executed("mbpp", problems, first, file) == {}
    assert execute_all("mbpp", problems, first, file) == {0: "failed", 1: "passed"}
    assert executed("mbpp", problems, first, file) == {0: "failed", 1: "passed"}
    assert capsys.readouterr().err.count("not this run's") == 0
    then = [right | {"index": 0}, first[1]]
    assert executed("mbpp", problems, then, file) == {1: "passed"}
    assert "ran has 1 result of programs that are not this run's" in capsys.readouterr().err
    assert execute_all("mbpp", problems, then, file) == {0: "passed", 1: "passed"}
    assert len(file.read_text().splitlines()) == 3


LIMITED = """
import os, sys, time
def many(count, child):
    for _ in range(count):
        if not os.fork():
            os.setsid()
            child()
            os._exit(0)
"""


@pytest.mark.parametrize(
    ("source", "limits", "result"),
    [
        ("import os\nos._exit(0)", {}, "failed"),  # leaves before its tests
        ("raise SystemExit(0)", {}, "failed"),
        ("x = bytearray(3 * 2**30)", {}, "failed"),
        ("while True: print('x' * 10000)", {}, "failed"),
        ("import time\ntime.sleep(60)", {"wall_seconds": 1.0}, "timeout"),
        ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", {}, "failed"),
        ("x = '\ud800'", {}, "failed"),  # no Unicode, so no program
        ("x = '\0'", {}, "failed"),
        ("import os, shutil\nshutil.rmtree(os.getcwd())", {}, "passed"),
        ("import os\nfor _ in range(1100): os.mkdir('a'); os.chdir('a')", {}, "passed"),
        # Of the processes together: none of them takes too much.
        (
            LIMITED + "many(4, lambda: (bytearray(b'x' * 60 * 2**20), time.sleep(60)))\n"
            "time.sleep(5)",
            {"memory_bytes": 2**28},
            "failed",
        ),
        (LIMITED + "many(20, lambda: time.sleep(60))\ntime.sleep(5)", {"processes": 16}, "failed"),
        (
            "for i in range(40): open(f'{i}', 'w').write('x' * 2**19)",
            {"folder_bytes": 2**24},
            "failed",
        ),
        ("for i in range(40): open(f'{i}', 'w').write('x' * 2**19)", {}, "passed"),
    ],
)
def test_a_program_is_held_by_limits(source, limits, result, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert passes(source, LIMITS._replace(**limits)) == result
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_program_starts_ends_with_it(tmp_path, waits):
    """A child process that outlives it is killed, in a session of its own too; so is its child."""
    mark = tmp_path / "mark"
    source = LIMITED
    source += f"def late():\n    os.fork()\n    time.sleep(2.5)\n    open({str(mark)!r}, 'w')\n"
    source += "many(3, late)\n" + ("time.sleep(60)" if waits else "time.sleep(0.2)")
    limits = LIMITS._replace(wall_seconds=1.0)
    assert passes(source, limits) == ("timeout" if waits else "passed")
    time.sleep(2.5)
    assert not mark.exists()


def test_ctrl_c_ends_a_program_too(tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    source = LIMITED + f"many(1, lambda: (time.sleep(2), open({str(mark)!r}, 'w')))\ntime.sleep(60)"
    wait = subprocess.Popen.wait

    def interrupted(process, timeout=None):
        if timeout is not None and timeout > 15:
            time.sleep(0.7)
            raise KeyboardInterrupt
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        passes(source)
    time.sleep(2)
    assert not mark.exists()


def answer(ids: list[int], lengths: list[int], reason: str = "stop", decode: float = 1.0):
    return Generation(
        prompt_tokens=3,
        token_ids=ids,
        acceptance_lengths=lengths,
        finish_reason=reason,
        seconds=Seconds(compile=5.0, prefill=0.5, decode=decode),
    )


def record(index: int, g: Generation, correct: bool | None = None, turn: int = 0):
    return {
        "index": index,
        "turn": turn,
        "check": None if correct is None else {"correct": correct, "rule": "boxed"},
        **{k: v for k, v in vars(g).items() if k != "seconds"},
        "seconds": vars(g.seconds),
    }


def test_acceptance_by_position_leaves_out_what_a_stop_cut():
    """Steps of 3, 1, 4 tokens and a last one of 2, whose third draft nobody knows."""
    rows = by_position([answer(list(range(11)), [3, 1, 4, 2])], 4)
    assert [r["tried"] for r in rows] == [4, 2, 2]
    assert [r["accepted_when_tried"] for r in rows] == [3 / 4, 1.0, 1 / 2]
    assert [r["accepted_of_all_steps"] for r in rows] == [3 / 4, 2 / 4, 1 / 4]


def test_acceptance_by_progress_goes_by_where_a_step_begins():
    rows = by_progress([answer(list(range(10)), [4, 5]), answer(list(range(10)), [1] * 9)])
    # Tokens 1 and 5 of 10 begin steps of the first; every token but the first one of the second.
    assert [r["tau"] for r in rows] == [None, 2.5, 1, 1, 1, 3.0, 1, 1, 1, 1]
    assert sum(r["steps"] for r in rows) == 11


def test_wilson_is_scipys():
    for right, count in [(0, 7), (3, 7), (7, 7), (650, 1319)]:
        want = binomtest(right, count).proportion_ci(0.95, "wilson")
        assert wilson(right, count) == pytest.approx((want.low, want.high), abs=1e-6)
    found = accuracy([{"correct": True, "rule": "boxed"}, {"correct": False, "rule": "none"}])
    assert found is not None and found["share"] == 0.5
    assert found["by_rule"]["boxed"] == {"judged": 1, "correct": 1}
    assert accuracy([]) is None


def test_speed_counts_the_steps_tokens_over_the_decoding_alone():
    found = speed([answer([1, 2, 3], [2]), answer(list(range(9)), [4, 4], decode=3.0)])
    assert found["tokens_per_second"] == 10 / 4
    assert found["tokens_per_second_with_prefill"] == 10 / 5
    assert found["seconds"] == {"compile": 10.0, "prefill": 1.0, "decode": 4.0}


def test_plain_decoding_beside():
    ours = [
        record(0, answer([1, 2, 3], [2]), True),
        record(1, answer([1, 2, 3, 4], [3]), True),
        record(2, answer([1, 2], [1]), False),
    ]
    plain = [
        record(2, answer([1, 2, 9], [1, 1], decode=2.0), True),
        record(0, answer([1, 2, 3], [1, 1], decode=4.0), True),
        record(1, answer([1, 7, 3, 4], [1, 1, 1], decode=6.0), False),
    ]
    found = compare(ours, plain, 2)
    assert "both_ended" not in found
    assert found["speed_up"] == pytest.approx((6 / 3) / (7 / 12))
    assert found["identical_outputs"] == 1
    assert found["first_differences"] == [
        {"index": 1, "turn": 0, "position": 1, "token": 2, "plain_token": 7},
        {"index": 2, "turn": 0, "position": 2, "token": None, "plain_token": 9},
    ]
    assert found["accuracy"]["correct"] == 2


def test_at_batch_1_speed_is_also_told_of_answers_that_ended():
    """There an answer's seconds are its own; loops and cut answers are another speed."""
    loop = list(range(20)) * 4
    ours = [
        record(0, answer([1, 2, 3], [2])),
        record(1, answer([1, 2, 3, 4], [3], decode=2.0)),
        record(2, answer(loop, [16] * 4 + [15])),
    ]
    plain = [
        record(0, answer([1, 2, 3], [1, 1], decode=8.0)),
        record(1, answer([1, 2, 3], [1, 1], "length", decode=3.0)),
        record(2, answer(loop, [1] * 79, decode=9.0)),
    ]
    found = summarise(ours, 16, plain, batch_size=1)
    assert found["speed"]["tokens_per_second"] == 84 / 4
    assert found["speed_ended"]["tokens_per_second"] == 5 / 3
    ended = found["baseline"]["both_ended"]  # the first alone
    assert (ended["answers"], ended["speed_up"]) == (1, 2 / (2 / 8))
    assert found["baseline"]["speed_up"] == pytest.approx((84 / 4) / (83 / 20))
    told = table(found)
    assert "speed, ended     1.67 tokens/s" in told
    assert "speed-up, ended  8.00 in decoding" in told and ", 1 answers" in told
    several = table(summarise(ours, 16, plain, batch_size=2))
    assert "speed, all       21.00" in several and "speed-up, all    5.06" in several
    assert "ended  " not in several.split("speed, all")[1]


def test_cut_and_looping_answers_are_counted_apart():
    loop = list(range(20)) * 4
    answers = [
        record(0, answer(list(range(5)), [4]), True),
        record(1, answer(list(range(5)), [2, 2], "length"), False),
        record(2, answer(loop, [16] * 4 + [15]), False),
    ]
    found = summarise(answers[::-1], 16, batch_size=2)
    assert found["acceptance"]["endings"] == {"ended": 1, "limit": 1, "looping": 1}
    assert found["share_cut_or_looping"] == pytest.approx(2 / 3)
    assert found["acceptance"]["ended"]["tau_pooled"] == 4
    assert found["acceptance"]["limit_or_looping"]["tau_pooled"] == pytest.approx(83 / 7)
    assert found["finish_reasons"] == {"length": 1, "stop": 2}
    assert json.dumps(found) == json.dumps(
        summarise(answers, 16, batch_size=2)
    )  # order does not matter
