"""A small tokenizer of our own: byte-level BPE with single digits and Qwen's chat format."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN, END_OF_TURN, MASK = SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|mask|>",
)
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> Any:
    """A transformers tokenizer of at most `vocab_size` ids, special tokens first.

    Digits stand alone, so that a number is as many tokens as it has digits.
    """
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        extra_special_tokens=[TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """tokenizer.json, its config and the chat template, as AutoTokenizer reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))


def encode_texts(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of many texts, on all cores; special tokens in them count as such."""
    found: list[list[int]] = []
    for start in range(0, len(texts), 10_000):
        found += tokenizer(texts[start : start + 10_000], add_special_tokens=False)["input_ids"]
    return found
