"""/v1/completions goes on with its prompt: no blank between them is lost, and offsets count it."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from jflash.io import load_tokenizer
from jflash.io.incremental import BEFORE, INCOMPLETE, Incremental
from jflash.io.text import decode
from jflash.serving.handle import Handle
from jflash.serving.request import Event, Request
from tests.support.gguf_files import EOS, write_gguf
from tests.support.reciting import Reciting, client_of

PROMPT, ANSWER = "My name is", " John."
MARKS = "<unk>", "<s>", "</s>"
END = 2


class GoingOn(Reciting):
    """Recites the tokens of an answer as they follow its prompt's, with logprobs."""

    async def submit(self, request: Request) -> Handle:
        handle = Handle(request, lambda _: None)
        ids = token_ids(self.tokenizer, PROMPT + ANSWER)[len(token_ids(self.tokenizer, PROMPT)) :]
        for i, token in enumerate(ids):
            reason = "length" if i == len(ids) - 1 else None
            known: Any = {"logprobs": (-0.5,)} if request.logprobs else {}
            if not i and request.prompt_logprobs is not None:
                known["prompt_logprobs"] = (-1.0,) * (len(request.prompt_ids) - 1)
            handle.give([Event((token,), finish_reason=reason, **known)])
        return handle


def token_ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Of Llama 2's and Mistral's kind: its decoder drops one blank at the beginning."""
    letters = "▁abcdefghijklmnopqrstuvwxyzMJ."
    names = [*MARKS, *(f"<0x{i:02X}>" for i in range(256)), *letters]
    model = BPE({x: i for i, x in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    blank = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    made.decoder = decoders.Sequence([*blank, decoders.Strip(" ", 1, 0)])
    unk, bos, eos = MARKS
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=unk, bos_token=bos, eos_token=eos
    )
    found.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return found


@pytest.fixture
def client(tokenizer) -> TestClient:
    return client_of(GoingOn(tokenizer), END)


def streamed(answer: Any) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


@pytest.mark.parametrize("echo", [False, True])
def test_the_blank_after_the_prompt_is_part_of_the_answer(client, echo):
    body = {"prompt": PROMPT, "max_tokens": 9, "echo": echo}
    want = PROMPT * echo + ANSWER
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == want
    pieces = streamed(client.post("/v1/completions", json=body | {"stream": True}))
    assert "".join(piece["text"] for piece in pieces) == want


def test_offsets_count_the_blank(client):
    body = {"prompt": PROMPT, "max_tokens": 9, "echo": True, "logprobs": 0}
    found = client.post("/v1/completions", json=body).json()["choices"][0]
    scores, text = found["logprobs"], found["text"]
    assert text == PROMPT + ANSWER
    # The tokenizer puts a blank before all, which the text does not have.
    tokens = scores["tokens"][1:]
    assert "".join(tokens) == text
    assert scores["text_offset"][1:] == [sum(map(len, tokens[:i])) for i in range(len(tokens))]


@pytest.mark.parametrize("adds", [False, True])
def test_an_echo_leaves_out_only_what_the_tokenizer_has_added(adds, tmp_path):
    """The token that begins messages of SmolLM2's kind is no beginning of every text."""
    change = {"tokenizer.ggml.add_bos_token": adds}
    client = client_of(GoingOn(load_tokenizer(write_gguf(tmp_path / "m.gguf", change=change))), EOS)
    prompt = f"<bos>{PROMPT}"
    body = {"prompt": prompt, "max_tokens": 9, "echo": True, "logprobs": 0}
    found = client.post("/v1/completions", json=body).json()["choices"][0]
    assert found["text"] == prompt + ANSWER
    scores = found["logprobs"]
    assert scores["tokens"][: 2 + adds] == ["<bos>"] * (1 + adds) + ["M"]
    assert scores["text_offset"][: 2 + adds] == [0] * (1 + adds) + [len("<bos>")]
    plain = client.post("/v1/completions", json=body | {"prompt": PROMPT}).json()["choices"][0]
    assert plain["text"] == PROMPT + ANSWER


def test_a_chats_answer_begins_anew(client):
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9}
    found = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert found["content"] == ANSWER[1:]


def test_a_text_goes_on_at_any_token(tokenizer):
    """But with none of a prompt that ends within a character."""
    plain = lambda ids: decode(tokenizer, ids)  # noqa: E731
    ids = token_ids(tokenizer, "a ö ü b")
    for cut in range(1, len(ids)):
        text = Incremental(plain, before=ids[:cut])
        given = "".join(text.push([token], False) for token in ids[cut:]) + text.push([], True)
        assert (plain(ids[:cut]) + given == plain(ids)) == (INCOMPLETE not in plain(ids[:cut]))
    lengths = list[int]()

    def counting(some: list[int]) -> str:
        lengths.append(len(some))
        return plain(some)

    Incremental(counting, before=ids * 9).push(ids[-1:], True)
    assert lengths == [BEFORE, BEFORE + 1]


@pytest.mark.parametrize("prompt", ["aö😀", "a öö", "üöä", "a😀😀", "a öbcd"])
def test_a_text_goes_on_after_characters_of_bytes(tokenizer, prompt):
    """A decoder reads no character of a run of bytes that begins within one."""
    plain = lambda ids: decode(tokenizer, ids)  # noqa: E731
    before, ids = token_ids(tokenizer, prompt), token_ids(tokenizer, prompt + ANSWER)
    text = Incremental(plain, before=before)
    assert "".join(text.push([token], False) for token in ids[len(before) :]) == ANSWER
