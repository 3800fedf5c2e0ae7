"""Random checkpoints of a few kilobytes, in Hugging Face layout, with a byte-level tokenizer.

Made through jflash's own writer; what the writer cannot make is edited afterwards by the tests.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jflash.io import save_checkpoint
from jflash.models.params import abstract_params
from jflash.records.config import DrafterConfig, TargetConfig
from jflash.records.specs import RopeConfig

VOCABULARY = 300  # 256 bytes, then <eos>, <user>, <assistant>; the rest names nothing
EOS, USER, ASSISTANT, MASK = 256, 257, 258, 299
POSITIONS = 240  # all that fits them fits one capacity, so little is compiled
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}"
    "{% else %}{{ m.content }}|{% endif %}{% endfor %}"
    "<assistant>{% if enable_thinking %}hmm{% endif %}"
)
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10000.0, scaling=None),
    max_position_embeddings=POSITIONS,
    qk_norm=True,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
)
TARGET = TargetConfig.alike(**SIZES, num_layers=2, tie_embeddings=False)
DRAFTER = DrafterConfig.alike(
    causal=False,
    **SIZES,
    num_layers=1,
    block_size=4,
    mask_token_id=MASK,
    target_layer_ids=(0, 1),
    num_target_layers=2,
    input_embedding_scale=1.0,
    output_multiplier=1.0,
    final_logit_softcapping=None,
)


class Folders(NamedTuple):
    target: Path
    drafter: Path


def unit_gain_params(config: TargetConfig | DrafterConfig, seed: int) -> Any:
    """Weights of unit gain, so that a random model says different things."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (
            np.ones(leaf.stored, np.float32)
            if len(leaf.stored) == 1
            else (rng.standard_normal(leaf.stored) * leaf.shape[0] ** -0.5).astype(np.float32)
        ),
        abstract_params(config),
    )


def make_pair(
    folder: Path, seed: int = 6, dtype: str = "float32", monotone: bool = False
) -> Folders:
    """A target with its tokenizer, and a drafter, below `folder`.

    Seed 6 says many different things. A monotone target has a head of zeros: it and its drafter
    say token 0 ("!") for ever, so every draft is accepted.
    """
    folders = Folders(folder / "target", folder / "drafter")
    params = unit_gain_params(TARGET, seed)
    if monotone:
        params["head"] *= 0
    save_checkpoint(folders.target, TARGET, params, dtype, {"eos_token_id": EOS})
    save_checkpoint(folders.drafter, DRAFTER, unit_gain_params(DRAFTER, seed + 1), dtype)
    write_tokenizer(folders.target)
    return folders


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE without merges: a token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<user>", "<assistant>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets keys of config.json; None removes one."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def edit_tensors(folder: Path, drop: tuple[str, ...] = (), **changes: np.ndarray) -> None:
    """Rewrites model.safetensors with some tensors gone and others put in."""
    path = folder / "model.safetensors"
    tensors = {k: v for k, v in load_file(path).items() if k not in drop} | changes
    save_file(tensors, path)
