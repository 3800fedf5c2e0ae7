"""A tokenizer of letters, with a chat template that has thoughts and tools, for random pairs."""

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

LETTERS = '{}[]":,.-_' + "ĠĊ" + "abcdefghijklmnopqrstuvwxyz" + "ABCDEFGHIJK" + "0123456789"
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
DIGITS = range(49, 59)  # their ids
END_OF_THOUGHTS, END = 61, 64
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}"
)


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """65 tokens: a letter each, one of two letters, marks that stay in a text, and the end."""
    tokens = [*LETTERS, '":']
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, [('"', ":")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.add_special_tokens(["<end>"])
    known = [tokenizer.token_to_id(token) for token in ("0", "</think>", "<end>")]
    assert known == [DIGITS[0], END_OF_THOUGHTS, END]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = TEMPLATE
    return fast
