"""What a request changes in the logits: as plain decoding at width 1 would have it, bit for bit."""

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.generate import Pair
from jflash.io import load_tokenizer
from jflash.records.decoding import Sampling
from jflash.serving.engine import Engine
from jflash.serving.grammar import LONGEST, Grammars, Kind, Matcher, Opening, fill
from jflash.serving.handle import Handle
from jflash.serving.request import Request
from jflash.serving.thread.job import Job
from jflash.serving.thread.loop import Loop
from jflash.system.embedded import EMBEDDED_PAIR
from jflash.tokens.logprobs import scored
from jflash.tokens.shaping import Shaping, constrained, shaped
from tests.support.attention_checks import ON_GPU
from tests.support.letters import DIGITS, END, LETTERS, letters_tokenizer
from tests.support.pairs import one_arithmetic, prompts, random_pair, replay_pair

pytestmark = pytest.mark.skipif(ON_GPU, reason="the law of a CPU's operations")
OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {5: 1.5, 9: -100.0, 42: -2.0}},
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.4},
    "presence": {"presence_penalty": 0.9},
    "minimum": {"min_tokens": 20},
}
PAIRS = [*itertools.combinations(OPTIONS, 2)]
PROMPT = prompts(1, seed=8, low=30, high=31)[0]
ALL_KNOWN = Request(
    prompt_ids=PROMPT, max_tokens=40, seed=1, logprobs=True, repetition_penalty=1.3,
    frequency_penalty=0.4,
)  # fmt: skip
DRAWN = Sampling(temperature=0.8, top_p=0.9)


@pytest.fixture(scope="module")
def engines():
    """The pair at width 16, plain decoding, and width 4 with a drafter that knows one text: that
    which plain decoding gives for `ALL_KNOWN`."""
    pair = one_arithmetic(random_pair(2, block_size=16))
    pair = Pair(replace(pair.models, draft_rule="greedy"), pair.params)
    how: dict[str, Any] = dict(max_batch=4, max_context=192, prefill_chunk=64, steps_per_call=2)
    every = {"kinds": ("drawn",)}  # one program serves them all; the wide engine has both
    with Engine(pair, **how) as wide, Engine(pair.plain(), **how, **every) as plain:
        text = [*PROMPT, *plain.generate([ALL_KNOWN])[0].token_ids]
        knows = replay_pair(pair, text)
        narrow = replace(knows.models, block_size=4)
        with Engine(Pair(narrow, knows.params), **how, **every) as narrow:
            yield [wide, narrow, plain]


def test_each_and_in_pairs_at_every_width(engines):
    ways = [OPTIONS[name] for name in OPTIONS] + [OPTIONS[a] | OPTIONS[b] for a, b in PAIRS]
    base = Request(prompt_ids=PROMPT, max_tokens=40, seed=1, logprobs=True)
    free = engines[2].generate([base])[0]
    stops = [free.token_ids[4]]  # what the minimum is for
    ways = [way | ({"stop_ids": stops} if "min_tokens" in way else {}) for way in [{}, *ways]]
    requests = [
        replace(base, sampling=sampling, **way)
        for way in ways
        for sampling in (base.sampling, DRAWN)
    ]
    wide, narrow, plain = (engine.generate(requests) for engine in engines)
    for request, one, other, want in zip(requests, wide, narrow, plain, strict=True):
        assert one.token_ids == other.token_ids == want.token_ids, request
        assert one.logprobs == other.logprobs == want.logprobs, request
        assert want.logprobs is not None and len(want.logprobs) == len(want.token_ids)
        if request.min_tokens:
            assert len(want.token_ids) >= 20
    greedy = [result.token_ids for result in plain[: 2 * len(OPTIONS) + 1 : 2]]
    assert len(set(map(tuple, greedy))) == len(greedy)  # every option says something
    assert requests.count(ALL_KNOWN) == 1
    # 1 + 9 · 4 + 3: a draft is judged by what comes after the drafts before it.
    assert narrow[requests.index(ALL_KNOWN)].acceptance_lengths == [4] * 9 + [3]


def test_the_rows_of_a_block_see_the_drafts_before_them():
    """Against the definition, on a block of one sequence."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 6)), jnp.float32)
    text, drafts = [4, 1, 1, 2], [1, 3]
    shaping = Shaping(*map(jnp.asarray, ([[0, -1]], [[0.5, 9.0]], [2.0], [0.3], [0.2], [1], [6])))
    tokens = jnp.asarray([[*text, 5, 5]], jnp.int32)
    stops = jnp.asarray([[5, -1]], jnp.int32)
    one = shaping._replace(ids=shaping.ids.astype(jnp.int32))
    got = shaped(logits, one, tokens, jnp.asarray([4]), jnp.asarray([drafts]), stops)[0]
    for row in range(3):
        before = text + drafts[:row]
        for token in range(6):
            x = float(logits[0, row, token]) + (0.5 if token == 0 else 0.0)
            if token in before:
                x = x / 2 if x > 0 else x * 2
            count = before[1:].count(token)
            x -= 0.3 * count + 0.2 * (count > 0)
            if token == 5 and len(before) < 6:
                x = -np.inf
            np.testing.assert_allclose(got[row, token], x, rtol=1e-6)


def test_scores_are_log_softmax_and_its_largest():
    logits = np.random.default_rng(1).normal(size=(2, 3, 67)).astype(np.float32) * 4
    logits[0, 0, [11, 40, 60]] = 9.5  # the lowest id first
    chosen = jnp.asarray([[0, 66, 5], [1, 2, 3]])
    want = np.asarray(jax.nn.log_softmax(logits))
    got = scored(jnp.asarray(logits), chosen, 4, jnp.bool_(True))
    np.testing.assert_allclose(
        got.chosen, np.take_along_axis(want, np.asarray(chosen)[..., None], -1)[..., 0], rtol=1e-5
    )
    order = np.argsort(-want, axis=-1, kind="stable")[..., :4]
    assert order[0, 0, :3].tolist() == [11, 40, 60]
    np.testing.assert_array_equal(got.ids, order)
    np.testing.assert_allclose(got.top, np.take_along_axis(want, order, -1), rtol=1e-5, atol=1e-6)


def test_most_probable_tokens_at_every_width(engines):
    """With drafts that are judged together, and by plain decoding; in both modes."""
    how: dict[str, Any] = dict(
        repetition_penalty=1.3, logit_bias={5: 2.0}, logprobs=True, top_logprobs=5
    )
    requests = [
        Request(prompt_ids=PROMPT, max_tokens=24, seed=1, **ways, **how)
        for ways in (
            {},
            {"sampling": DRAWN},
            {"logprobs_mode": "processed"},
            {"logprobs_mode": "processed", "sampling": Sampling(temperature=0.8, top_k=3)},
        )
    ]
    quiet = replace(requests[0], logprobs=False, top_logprobs=0, seed=2)
    wide, narrow, plain = (engine.generate([*requests, quiet]) for engine in engines)
    for one, other, want in zip(wide, narrow, plain, strict=True):
        assert one.top_logprobs == other.top_logprobs == want.top_logprobs
        assert one.logprobs == other.logprobs == want.logprobs
    assert plain[-1].top_logprobs is None and plain[-1].token_ids == plain[0].token_ids
    for result in plain[:-1]:
        assert result.top_logprobs is not None and result.logprobs is not None
        for token, number, top in zip(
            result.token_ids, result.logprobs, result.top_logprobs, strict=True
        ):
            assert len(top) == 5 and [x for _, x in top] == sorted((x for _, x in top))[::-1]
            assert dict(top).get(token, number) == number
    raw, processed, drawn = plain[0], plain[2], plain[3]
    assert raw.token_ids == processed.token_ids and raw.logprobs != processed.logprobs
    # What was chosen greedily is the most probable token of the changed logits.
    assert [top[0][0] for top in processed.top_logprobs] == processed.token_ids
    assert [top[0][0] for top in raw.top_logprobs] != raw.token_ids
    assert min(x for top in drawn.top_logprobs for _, x in top) == -np.inf  # top_k left fewer


def test_a_prompts_logprobs_are_those_of_its_generation(engines):
    """Bit for bit: computed by chunks of a prompt, and by the steps that made it."""
    how: dict[str, Any] = dict(logprobs=True, top_logprobs=3)
    made = engines[1].generate([replace(ALL_KNOWN, **how)])[0]
    text = [*PROMPT, *made.token_ids]
    again = Request(prompt_ids=text, max_tokens=1, prompt_logprobs=3)
    for engine in engines:
        engine.generate([again])  # its pages are known now
        got = engine.generate([again])[0]
        assert got.prompt_logprobs is not None and got.prompt_top_logprobs is not None
        assert got.cached_tokens == 0 and got.logprobs is None
        assert len(got.prompt_logprobs) == len(text) - 1 > 64  # two chunks
        assert got.prompt_logprobs[len(PROMPT) - 1 :] == made.logprobs
        assert got.prompt_top_logprobs[len(PROMPT) - 1 :] == made.top_logprobs


def test_a_request_chooses_its_draft_rule(engines):
    """By rule greedy the draws are plain decoding's beside neighbours by rule sampled."""
    pair = engines[0].pair
    drawing = Pair(replace(pair.models, draft_rule="sampled"), pair.params)
    one = Request(prompt_ids=PROMPT, max_tokens=40, sampling=DRAWN, seed=3)
    ways = [one, replace(one, draft_rule="sampled"), replace(one, draft_rule="greedy", seed=4)]
    want = [result.token_ids for result in engines[2].generate([one, ways[2]])]
    how: dict[str, Any] = dict(max_batch=4, max_context=192, prefill_chunk=64, steps_per_call=2)
    with Engine(drawing, **how, kinds=("drawn",)) as e:
        got = [result.token_ids for result in e.generate(ways)]
        assert e.submit(replace(one, seed=None)).request.best_drafts is False
    assert [got[0], got[2]] == want and got[1] != got[0]
    with pytest.raises(ValueError, match="draft_rule 'sampled'"):
        engines[0].submit(ways[1])


def test_refusals(engines):
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"min_tokens": 257}, "min_tokens 257"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
        ({"top_logprobs": 3}, "top_logprobs 3 needs logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs 21"),
        ({"logprobs_mode": "x"}, "logprobs_mode 'x'"),
        ({"presence_penalty": float("nan")}, "presence_penalty nan"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias inf"),
        ({"logit_bias": {1: -1e39}}, "logit_bias -1e"),  # infinite in float32
        ({"frequency_penalty": 1e39}, "frequency_penalty 1e"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty 1e-46"),
        ({"logit_bias": {67: 1.0}, "max_tokens": 9}, "logit_bias of token 67"),
    ]
    for how, why in wrong:
        with pytest.raises(ValueError, match=why):
            engines[0].submit(Request(prompt_ids=[1], **how))


def test_a_salt_keeps_prefixes_apart(engines):
    request = Request(prompt_ids=prompts(1, seed=3, low=130, high=131)[0], max_tokens=2)
    cached = [
        engines[0].generate([replace(request, cache_salt=salt)])[0].cached_tokens
        for salt in ("a", "b", "a")
    ]
    assert cached == [0, 0, 128]


@pytest.fixture(scope="module")
def grammars():
    tokenizer = letters_tokenizer()
    return Grammars(tokenizer, 67, [END]), tokenizer


OBJECT = {
    "type": "object", "required": ["ab", "c"], "additionalProperties": False,
    "properties": {
        "ab": {"type": "array", "items": {"enum": ["x", "yz", 12]}, "maxItems": 4},
        "c": {"type": "boolean"},
    },
}  # fmt: skip
FORMS: list[tuple[Kind, str, str | None]] = [
    ("json_schema", json.dumps(OBJECT), None),
    ("regex", "[a-f]{3}( [0-9]{2,4}){5}", "[a-f]{3}( [0-9]{2,4}){5}"),
    ("choice", json.dumps(["Abba", "gold_fish", "1:2"]), "Abba|gold_fish|1:2"),
    ("grammar", 'start: "{" item+ "}"\nitem: /[a-z]+/ "," NUM\nNUM: /[0-9]+/', None),
    ("grammar", 'root ::= "[" [a-z]* "]"', r"\[[a-z]*\]"),
]


def test_a_grammar_allows_what_plain_decoding_allows(engines, grammars):
    """Constrained text and its neighbours are plain decoding's, and a whole text is of its form."""
    compiler, tokenizer = grammars
    wide, narrow, plain = engines
    base = Request(prompt_ids=PROMPT, max_tokens=40, seed=1, logprobs=True, stop_ids=[END])
    forms = [replace(base, grammar=compiler.compile(kind, text)) for kind, text, _ in FORMS]
    odd = [replace(forms[0], min_tokens=35), replace(forms[1], repetition_penalty=1.5)]
    drawn = [replace(one, sampling=DRAWN) for one in forms]
    alone = [replace(base, stop_ids=[], index=i) for i in range(3)]
    requests = [each for i in range(5) for each in (forms[i], drawn[i], *alone[i : i + 1])] + odd
    got, want = wide.generate(requests), plain.generate(requests)
    assert got == [
        replace(b, acceptance_lengths=a.acceptance_lengths) for a, b in zip(got, want, strict=True)
    ]
    free = plain.generate(alone)
    assert [got[requests.index(one)].token_ids for one in alone] == [x.token_ids for x in free]
    ends = set()
    for request, result in zip(requests, got, strict=True):
        if request.grammar is None:
            continue
        text = tokenizer.decode(result.token_ids, skip_special_tokens=True)
        ends.add(result.finish_reason)
        kind, _, pattern = FORMS[[one.grammar for one in forms].index(request.grammar)]
        if result.finish_reason == "length":
            assert len(result.token_ids) == 40
        elif kind == "json_schema":
            value = json.loads(text)
            assert set(value) == {"ab", "c"} and set(value["ab"]) <= {"x", "yz", 12}
        elif pattern:
            assert re.fullmatch(pattern, text), text
        else:
            assert re.fullmatch(r"\{([a-z]+,[0-9]+)+\}", text), text
    assert ends == {"stop", "length"}
    # Every draft is right, so that each row of a block is judged by a mask of its own.
    long = forms[1]
    text = [*PROMPT, *plain.generate([long])[0].token_ids]
    before = narrow.pair.params.drafter
    knows = replay_pair(Pair(narrow.pair.models, narrow.pair.params), text)
    narrow.update_weights(drafter=knows.params.drafter)
    result = narrow.generate([long])[0]
    narrow.update_weights(drafter=before)
    assert [*PROMPT, *result.token_ids] == text and result.finish_reason == "stop"
    assert set(result.acceptance_lengths[:-1]) == {4}


def test_a_form_goes_on_after_each_preemption(engines, grammars):
    """Its place in the grammar stays while its keys and values are computed again."""
    wide, give = engines[0], lambda *_: None
    grammar = grammars[0].compile(*FORMS[1][:2])
    request = Request(prompt_ids=PROMPT, max_tokens=40, seed=1, stop_ids=[END], grammar=grammar)
    [want] = wide.generate([request])
    loop = Loop(wide.pair.models, wide.pair.params, wide._layout, b"")
    loop.device.prepare_grammars()
    job = Job(
        handle=Handle(request, give), order=(0, 0), seed=1, deadline=None, tokens=list(PROMPT),
        matcher=Matcher(grammar),
    )  # fmt: skip
    loop.waiting.append(job)
    while job.reason is None:
        loop.round(give)
        loop.drain(give)
        if job.reason is None and job.gained:  # which needs two rounds: drafts, and a step
            loop.preempt(job)
    assert job.tokens == [*PROMPT, *want.token_ids] and want.finish_reason == "stop"
    assert loop.counts.preempted >= 3


def test_a_grammar_that_begins_after_a_mark(engines, grammars):
    """The mark is a draft in the middle of a block, and the grammar begins in the same block."""
    free = engines[2].generate([ALL_KNOWN])[0].token_ids
    first = next(i for i, x in enumerate(free) if i > 4 and i % 4 == 2 and free.index(x) == i)
    grammar = grammars[0].compile("regex", "[0-9]{5}", opens=Opening(free[first]))
    request = replace(ALL_KNOWN, stop_ids=[END], grammar=grammar)
    wide, narrow, plain = (engine.generate([request])[0] for engine in engines)
    ids = wide.token_ids
    assert ids == narrow.token_ids == plain.token_ids
    assert ids[: first + 1] == free[: first + 1] and ids[-1] == END and len(ids) == first + 7
    assert set(ids[first + 1 : -1]) <= set(DIGITS)
    assert narrow.acceptance_lengths[: first // 4] == [4] * (first // 4)
    matcher = Matcher(grammars[0].compile("regex", "[0-9]", opens=Opening(7, after=(5, 6))))
    matcher.take([7, 5])
    rows = lambda *drafts: matcher.constrained(drafts)[::2]  # noqa: E731
    assert rows(6, 7, DIGITS[0]) == (2, [DIGITS[0]]) and rows(7, 6, 7) == (4, [])
    matcher.take([6, 9])
    assert rows(8, 7) == (2, []) and rows(8, 8) == (3, [])


def test_a_tokenizer_of_more_tokens_than_the_model():
    """As Gemma 3's: the masks are over the model's 64, and 65 tokens have words of their own."""
    grammar = Grammars(letters_tokenizer(), 64, [63]).compile("regex", "[0-9]x?")
    masks = np.full((2, 3, 2), -1, np.int32)
    fill(masks, [(1, Matcher(grammar), [DIGITS[4], 5])])
    bits = (masks.view(np.uint32)[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    free = [np.flatnonzero(row).tolist() for row in bits.reshape(6, 64)]
    letter = LETTERS.index("x")
    assert free[3] == [*DIGITS] and free[4] == [letter, 63] and free[0] == [*range(64)]


def test_a_long_chain_of_rules_ends_no_process(grammars):
    """llguidance follows them by recursion, and a thread's usual stack holds less than 5,000."""
    count = 12_000
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(count))
    texts = [
        ("grammar", f'start: r0\n{rules}\nr{count}: "a"'),
        ("grammar", f'start: R0\n{rules.upper()}\nR{count}: "a"'),
        ("json_schema", json.dumps(linked(6_000))),
    ]
    for kind, text in texts:
        assert len(text) < LONGEST
        matcher = Matcher(grammars[0].compile(kind, text))
        matcher.take([LETTERS.index("a" if kind == "grammar" else "7")])
        assert not matcher.error
    longer = f'start: "{"a" * LONGEST}"'
    with pytest.raises(ValueError, match=f"^{len(longer)} characters: at most {LONGEST}$"):
        grammars[0].compile("grammar", longer)


@pytest.mark.parametrize("count", [2, 5000])
def test_a_text_is_one_of_many_choices(grammars, count):
    """What follows a text of which another goes on is the end, or the rest of that one."""
    texts = ["b" + "a" * (i // 100) + "c" * (i % 100) for i in range(count)]
    grammar = grammars[0].compile("choice", json.dumps([*texts, "b"]))
    matcher, masks = Matcher(grammar), np.full((1, 1, grammar.words), -1, np.int32)
    matcher.take([LETTERS.index("b")])
    fill(masks, [(0, matcher, [])])
    assert not matcher.error
    ids = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
    after = {"c"} if count == 2 else {"a", "c"}
    assert {*map(int, ids)} == {END, *map(LETTERS.index, after)}


def linked(count: int) -> dict[str, Any]:
    """A schema of a number, behind so many others."""
    places = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": places | {f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def test_a_grammar_is_too_complex_where_only_its_request_waits(grammars):
    """Its first mask took 0.7 s in the engine's thread, and its error had the whole grammar."""
    with pytest.raises(ValueError, match=r"^lexer error: too many expressions constructed$"):
        grammars[0].compile("regex", "(b{1000}){1000}")
    with pytest.raises(ValueError, match=r"^panic: .*grammar\.symbols\.len\(\) < [^<>]*$"):
        grammars[0].compile("grammar", "start: " + '"a"+' * 65_520)
    later = Matcher(grammars[0].compile("regex", "a{9}"))
    assert not later.error
    later.take([LETTERS.index("b")])
    assert later.error.startswith("Parser Error") and "<state>" not in later.error


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("choice", '["a<|im_end|>b"]', "a<|im_end|>b"),
        ("choice", '["<|mask|><|im_end|>"]', "<|mask|><|im_end|>"),
        ("json_schema", '{"const": "x<|im_end|>y"}', '"x<|im_end|>y"'),
        ("regex", r"x<\|im_end\|>y{2}", "x<|im_end|>yy"),
        ("grammar", 'start: "a" <|im_start|> "b<|im_start|>"', "a<|im_start|>b<|im_start|>"),
    ],
)
def test_names_of_special_tokens_in_a_form_are_letters(kind, source, text):
    """Of the embedded pair, whose 4 first tokens are special and whose texts end with the third;
    where the grammar names a token without quotes, it is the token."""
    tokenizer: Any = load_tokenizer(EMBEDDED_PAIR / "target")
    matcher, ids = Matcher(Grammars(tokenizer, 4096, [2]).compile(kind, source)), list[int]()
    while not ids or ids[-1] != 2:
        masks = np.full((1, 1, 128), -1, np.int32)
        fill(masks, [(0, matcher, [])])
        assert not matcher.error
        [token] = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        ids.append(int(token))
        matcher.take(ids[-1:])
    assert tokenizer.decode(ids[:-1]) == text
    assert [i for i in ids[:-1] if i < 4] == ([1] if kind == "grammar" else [])


def test_wrong_grammars_are_refused(engines, grammars):
    compiler, _ = grammars
    for kind, text in [
        ("regex", "[0-9"), ("json_schema", '{"type": "nope"}'), ("json_schema", "no JSON"),
        ("grammar", 'start: "a" b'), ("grammar", "root ::= ("), ("choice", "[]"),
        ("json_schema", '{"enum": []}'),
    ]:  # fmt: skip
        with pytest.raises(ValueError):
            compiler.compile(kind, text)
    for kind, text, why in [
        ("regex", "(" + "a" * 2000, "unclosed group"), ("json_schema", '{"type": "z%s"}', "type"),
        ("grammar", "start: " + '"x" ' * 600 + "%%%", "lexer error"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=why) as refused:
            compiler.compile(kind, text.replace("%s", "z" * 2000))
        assert len(str(refused.value)) <= 300
    grammar = compiler.compile("regex", "a")
    assert compiler.compile("regex", "a").start is grammar.start
    with pytest.raises(ValueError, match="end 64 is not among the stop_ids"):
        engines[0].submit(Request(prompt_ids=[1], max_tokens=2, grammar=grammar))


def test_the_grammar_has_the_last_word():
    """Against the definition; -inf everywhere leaves the raw logits of what it allows."""
    logits = np.random.default_rng(0).normal(size=(1, 3, 40)).astype(np.float32)
    changed = logits + 1
    changed[0, 1, 7] = changed[0, 2, :] = -np.inf
    free = np.zeros((3, 64), np.uint32)
    free[0, :40], free[1, [7, 31, 32]], free[2, [5, 39]] = 1, 1, 1
    words = (free.reshape(3, 2, 32) << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    got = np.asarray(constrained(*map(jnp.asarray, (changed, logits, words.view(np.int32)[None]))))
    want = np.full((3, 40), -np.inf, np.float32)
    want[0], want[1, [31, 32]], want[2, [5, 39]] = (
        changed[0, 0], changed[0, 1, [31, 32]], logits[0, 2, [5, 39]]
    )  # fmt: skip
    np.testing.assert_array_equal(got[0], want)
