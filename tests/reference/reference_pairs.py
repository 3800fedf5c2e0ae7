"""Small random target/drafter pairs for `make_cases.py`: their shapes, weights and folders.

The targets are random networks whose weights are large enough that greedy text wanders before it
falls into a loop.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import reference_gemma as gemma
import reference_muse as muse
import torch
from dflash.model import DFlashDraftModel
from reference_hybrid import hybrid, randomise
from reference_sigmoid import glm4, glm4_moe, minimax_m2, randomise_corrections
from reference_windows import gpt_oss, randomise_gpt_oss
from safetensors.torch import save_file
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Glm4ForCausalLM,
    Glm4MoeForCausalLM,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MuseGlimmerForConditionalGeneration,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

MAX_POSITIONS = 1024
FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (partial(MistralConfig, sliding_window=None), MistralForCausalLM),
    "qwen3_5": (hybrid(Qwen3_5TextConfig), Qwen3_5ForCausalLM),
    "qwen3_5_moe": (
        hybrid(Qwen3_5MoeTextConfig, shared_expert_intermediate_size=24),
        Qwen3_5MoeForCausalLM,
    ),
    "qwen3_next": (
        hybrid(Qwen3NextConfig, shared_expert_intermediate_size=24),
        Qwen3NextForCausalLM,
    ),
    "gpt_oss": (gpt_oss, GptOssForCausalLM),
    "gemma3_text": (
        gemma.windowed(
            Gemma3TextConfig, {"rope_type": "linear", "factor": 4.0}, query_pre_attn_scalar=24
        ),
        Gemma3ForCausalLM,
    ),
    "minimax_m2": (minimax_m2, MiniMaxM2ForCausalLM),
    "glm4_moe": (glm4_moe, Glm4MoeForCausalLM),
    "glm4": (glm4, Glm4ForCausalLM),
    "gemma4_text": (gemma.gemma4, Gemma4ForCausalLM),
    "muse_glimmer": (muse.muse_glimmer, MuseGlimmerForConditionalGeneration),
}
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
GEMMAS = ("gemma3_text", "gemma4_text")
BY_SIGMOID = ("minimax_m2", "glm4_moe")
WITH_EXPERTS = ("qwen3_moe", "qwen3_5_moe", "qwen3_next", "gpt_oss", *BY_SIGMOID)


class Unusable(Exception):
    """This draw does not serve; the caller draws again from a derived seed."""


@dataclass(frozen=True)
class Experts:
    """What is fixed about the experts of a target."""

    number: int
    a_token: int
    ffn: int
    renormalise: bool
    sparse_step: int  # every so many layers has experts
    dense_layers: tuple[int, ...]
    stacked: bool  # one tensor for all experts of a layer, not one for each

    def config(self) -> dict:
        return {
            "num_experts": self.number,
            "num_experts_per_tok": self.a_token,
            "moe_intermediate_size": self.ffn,
            "norm_topk_prob": self.renormalise,
            "decoder_sparse_step": self.sparse_step,
            "mlp_only_layers": list(self.dense_layers),
        }


@dataclass(frozen=True)
class Shape:
    """What is fixed about a pair; vocabulary, theta and eps come from the seed."""

    family: str
    hidden: int
    layers: int
    heads: tuple[int, int, int]  # query heads, K/V heads, head_dim
    ffn: int
    tied: bool
    block: int
    layer_ids: tuple[int, ...] | None  # None: left out, the default formula applies
    draft_layers: int
    draft_heads: tuple[int, int, int]
    draft_ffn: int
    form: str  # block_size in dflash_config ("inner") or outside ("top"); "flat": no dflash_config
    old_rope: bool  # rope_theta + rope_scaling instead of rope_parameters
    sharded: bool = False
    bare_head_dim: bool = False  # target's config.json without head_dim
    windows: tuple[bool, ...] = ()  # which of the drafter's layers have one; (): none
    window: int = 0
    is_causal: bool | None = None  # None: left out
    draft_rope: str = ""  # of the drafter, a key of _SCALED; "": as the target's plan says
    scaled: bool = False  # embeddings and logits of the drafter, and a soft cap
    small_files: bool = False  # weights rounded to bfloat16 and stored as such
    experts: Experts | None = None
    learnable: float = 0.4  # the share of drafts that the drafter is to learn by heart


SMALL_SHAPES = [
    Shape("qwen2", 32, 4, (2, 2, 16), 64, False, 11, (1, 3), 2, (4, 2, 16), 48, "flat", True),
    # L = 7, m = 3: the default ids are 1, round(2.5) = 2 and 4, so rounding half up would show.
    Shape(
        "llama", 32, 7, (2, 1, 16), 48, False, 16, None, 3, (4, 4, 16), 40, "inner", False, True,
        True,
    ),
    Shape("qwen3", 40, 4, (4, 1, 24), 64, True, 16, (0, 2), 2, (2, 1, 32), 56, "top", True),
    Shape(
        "qwen3_moe", 40, 4, (4, 2, 16), 56, False, 16, (0, 2), 2, (4, 2, 16), 64, "inner", False,
        experts=Experts(8, 3, 24, True, 1, (1,), False), small_files=True,
    ),
    # Every layer is tapped.
    Shape(
        "mistral", 40, 3, (4, 2, 16), 56, False, 16, (0, 1, 2), 2, (4, 2, 16), 64, "top", False,
        small_files=True,
    ),
    # Hybrids: blocks of which many cross a border of the delta net's chunks.
    Shape(
        "qwen3_5", 32, 3, (4, 2, 16), 48, False, 11, (0, 2), 2, (2, 1, 16), 40, "inner", False,
        small_files=True, learnable=0.4,
    ),
    Shape(
        "qwen3_5_moe", 40, 2, (2, 1, 16), 48, False, 5, (0, 1), 2, (2, 1, 16), 40, "top", False,
        experts=Experts(6, 2, 16, True, 1, (), False), small_files=True, learnable=0.5,
    ),
    Shape(
        "qwen3_next", 40, 2, (2, 2, 16), 48, False, 4, (0, 1), 2, (2, 1, 16), 40, "inner", False,
        experts=Experts(6, 2, 16, False, 1, (1,), False), small_files=True, learnable=0.5,
    ),
    # Every layer is tapped; windows narrower than a block.
    Shape(
        "gpt_oss", 32, 4, (4, 2, 16), 24, False, 11, (0, 1, 2, 3), 2, (2, 1, 16), 40, "inner",
        False, experts=Experts(6, 2, 24, True, 1, (), False), small_files=True, learnable=0.4,
    ),
    # Targets with windows, which most texts exceed; their drafters take scaled embeddings.
    Shape(
        "gemma3_text", 32, 4, (4, 2, 16), 48, True, 8, (0, 2), 2, (2, 1, 16), 40, "inner", False,
        small_files=True, learnable=0.85,
    ),
    Shape(
        "glm4_moe", 40, 2, (4, 2, 16), 40, False, 5, (0, 1), 2, (2, 1, 16), 64, "top", False,
        experts=Experts(8, 2, 16, True, 1, (0,), False), small_files=True, learnable=0.4,
    ),
    Shape(
        "minimax_m2", 40, 2, (4, 2, 16), 24, False, 5, (0, 1), 2, (2, 1, 16), 64, "inner", False,
        experts=Experts(6, 2, 24, True, 1, (), False), small_files=True, learnable=0.4,
    ),
    Shape(
        "glm4", 40, 2, (4, 2, 16), 48, False, 5, (0, 1), 2, (2, 1, 16), 64, "inner", False,
        small_files=True, learnable=0.5,
    ),
    Shape(
        "gemma4_text", 32, 4, (4, 2, 8), 48, True, 5, (1, 3), 2, (2, 1, 16), 40, "inner", False,
        small_files=True, learnable=0.7,
    ),
    Shape(
        "gemma4_text", 32, 3, (4, 2, 8), 40, True, 5, (0, 2), 2, (2, 1, 16), 40, "top", False,
        experts=Experts(6, 2, 16, True, 1, (), False), small_files=True, learnable=0.7,
    ),
    Shape(
        "muse_glimmer", 40, 2, (4, 2, 16), 48, False, 5, (0, 1), 2, (2, 1, 16), 64, "top", False,
        small_files=True, learnable=0.5,
    ),
]  # fmt: skip
# Windows: causal by default beside a full layer, two-sided and narrower than the block, and causal
# by decree.
WINDOW_SHAPES = [
    Shape(
        "qwen3", 32, 3, (2, 1, 16), 40, True, 8, (0, 1), 3, (2, 1, 16), 40, "inner", False,
        windows=(True, True, False), window=20, draft_rope="yarn", small_files=True,
        learnable=0.4,
    ),
    Shape(
        "llama", 32, 3, (2, 1, 16), 40, False, 8, (0, 2), 2, (2, 2, 16), 40, "top", True,
        windows=(True, True), window=6, is_causal=False, draft_rope="deepseek", scaled=True,
        small_files=True, learnable=0.4,
    ),
    Shape(
        "qwen3", 32, 3, (2, 1, 16), 40, False, 5, (1, 2), 2, (2, 1, 16), 40, "flat", False,
        windows=(False, True), window=33, is_causal=True, draft_rope="linear", small_files=True,
        learnable=0.4,
    ),
]  # fmt: skip
# The last pair of the other sets must be 40 wide or so and have 16-token blocks: it fills the gaps.
FULL_SHAPES = [
    Shape("qwen3", 64, 4, (4, 4, 32), 96, False, 8, (0, 3), 2, (2, 1, 24), 64, "inner", False),
    Shape("qwen2", 48, 3, (2, 1, 24), 64, True, 5, (2,), 1, (4, 1, 16), 96, "inner", True, True,
        learnable=0.6),
    Shape("llama", 64, 6, (4, 1, 16), 96, False, 16, (1, 3, 5), 3, (2, 2, 32), 80, "inner", True),
    Shape("llama", 48, 4, (4, 2, 16), 64, True, 7, (0, 1), 2, (6, 3, 16), 72, "top", False),
    WINDOW_SHAPES[0],
    replace(WINDOW_SHAPES[1], learnable=0.2),  # it sees six tokens, so few seeds reach more
    Shape(
        "qwen3_moe", 32, 4, (2, 2, 16), 48, False, 8, (1, 3), 2, (2, 1, 24), 64, "top", True,
        experts=Experts(6, 2, 32, False, 2, (), True),
    ),
    *SMALL_SHAPES[3:],
]  # fmt: skip


def families_of_turn(turn: int) -> list[str]:
    """Every other family: these have DFlash drafters at this turn, DFlash 2 ones at the next."""
    return list(FAMILIES)[turn % 2 :: 2]


def full_of_turn(turn: int) -> list[int]:
    """Places in FULL_SHAPES: of the turn's families each kind of drafter, once."""
    families = families_of_turn(turn)
    alike: dict[tuple, list[int]] = {}
    for place, shape in enumerate(FULL_SHAPES):
        if shape.family in families:
            stacked = bool(shape.experts and shape.experts.stacked)
            alike.setdefault((shape.family, shape.windows, stacked), []).append(place)
    return sorted(places[turn // 2 % len(places)] for places in alike.values())


@dataclass
class Pair:
    """A target and its drafter, as loaded back from their folders."""

    shape: Shape
    target: PreTrainedModel
    drafter: DFlashDraftModel

    @property
    def vocab(self) -> int:
        return self.target.config.get_text_config().vocab_size


def _llama3(theta: float) -> dict:
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,  # small: short texts must feel the scaling
    }


_YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
_SCALED = {
    "yarn": _YARN,
    "deepseek": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 8.0, "beta_slow": 2.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
}


def _common(draw: random.Random, heads: tuple[int, int, int], rope: dict) -> dict:
    return {
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "rope_parameters": rope,
        "rms_norm_eps": draw.choice([1e-6, 1e-5, 1e-3]),
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _rope(draw: random.Random, scaled: bool) -> dict:
    theta = draw.choice([1e3, 1e4, 5e4, 5e5, 1e6])
    return _llama3(theta) if scaled else {"rope_type": "default", "rope_theta": theta}


@torch.no_grad()
def _randomise_norms(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)


@torch.no_grad()
def random_target(shape: Shape, draw: random.Random) -> PreTrainedModel:
    config_class, model_class = FAMILIES[shape.family]
    # A tied head favours repeating the newest token; louder layers drown that out.
    gain = 1.6 if shape.tied else 1.2
    config = config_class(
        vocab_size=draw.randrange(64, 201),
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        tie_word_embeddings=shape.tied,
        initializer_range=0.2,
        **_common(draw, shape.heads, _rope(draw, shape.family == "llama")),
        **(shape.experts.config() if shape.experts else {}),
    )
    model = model_class(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0, 0.4)
        elif "embed" in name or "lm_head" in name:
            parameter.normal_(0, 3.0 / math.sqrt(shape.hidden))
        elif "norm" not in name:
            parameter.normal_(0, gain / math.sqrt(parameter.shape[-1]))
    _randomise_norms(model)
    if shape.family in HYBRIDS:
        randomise(model)
    if shape.family == "gpt_oss":
        randomise_gpt_oss(model)
    if shape.family in GEMMAS:
        gemma.randomise(model)
    if shape.family == "muse_glimmer":
        muse.randomise(model)
    if shape.family in BY_SIGMOID:
        randomise_corrections(model)
    return model


def embedding_scale(drafter: DFlashDraftModel) -> float:
    """By which the drafter multiplies the target's embeddings."""
    return getattr(drafter.config, "dflash_config", {}).get("input_embedding_scale", 1.0)


def untrained_drafter(shape: Shape, target: PreTrainedModel, draw: random.Random) -> nn.Module:
    vocab = target.config.get_text_config().vocab_size
    mask = draw.randrange(vocab)
    inner: dict = {"mask_token_id": mask}
    if shape.layer_ids is not None:
        inner["target_layer_ids"] = list(shape.layer_ids)
    if shape.scaled:
        inner |= {"input_embedding_scale": 1.7, "output_multiplier": 0.6}
        inner |= {"final_logit_softcapping": 25.0}
    if shape.family in GEMMAS:  # without the key dflash 0.1.0 takes rows as they are
        inner["input_embedding_scale"] = shape.hidden**0.5
    outer: dict = {"num_target_layers": shape.layers}
    (inner if shape.form == "inner" else outer)["block_size"] = shape.block
    outer |= inner if shape.form == "flat" else {"dflash_config": inner}
    if shape.windows:
        outer |= {"use_sliding_window": True, "sliding_window": shape.window}
    if shape.is_causal is not None:
        outer["is_causal"] = shape.is_causal
    rope = _rope(draw, shape.bare_head_dim)
    if shape.draft_rope:
        rope = {"rope_theta": rope["rope_theta"], **_SCALED[shape.draft_rope]}
    windows = shape.windows or (False,) * shape.draft_layers
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.draft_ffn,
        num_hidden_layers=shape.draft_layers,
        layer_types=["sliding_attention" if own else "full_attention" for own in windows],
        **_common(draw, shape.draft_heads, rope),
        **outer,
    )
    drafter = DFlashDraftModel(config)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, (0.5 if "down" in name else 0.9) / parameter.shape[1] ** 0.5)
    _randomise_norms(drafter)
    return drafter


def _rewrite_config(folder: Path, old_rope: bool, bare_head_dim: bool) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("_name_or_path", None)
    if bare_head_dim:
        config.pop("head_dim")
    if old_rope:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def round_weights(model: nn.Module) -> None:
    """To what bfloat16 holds, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def halved(model: nn.Module) -> dict:
    """What save_pretrained is told to store tensors half as long, of rounded weights."""
    return {"state_dict": {name: x.bfloat16() for name, x in model.state_dict().items()}}


def save(shape: Shape, target: nn.Module, drafter: nn.Module, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shards = {"max_shard_size": "64KB"} if shape.sharded else {}
    stored = halved if shape.small_files else lambda model: {}
    target.save_pretrained(folder / "target", **shards, **stored(target))
    if shape.experts and shape.experts.stacked:
        # transformers 5 holds them so, but saves them in the older form.
        tensors = {k: v.contiguous() for k, v in target.state_dict().items()}
        save_file(tensors, folder / "target" / "model.safetensors", metadata={"format": "pt"})
    drafter.save_pretrained(folder / "drafter", **stored(drafter))
    for extra in folder.glob("*/generation_config.json"):
        extra.unlink()
    _rewrite_config(folder / "target", shape.old_rope, shape.bare_head_dim)
    _rewrite_config(folder / "drafter", shape.old_rope, False)
    _check_published_form(shape, folder)


def load(shape: Shape, folder: Path) -> Pair:
    """Read both folders back: the record comes from what they hold."""
    model_class = FAMILIES[shape.family][1]
    target = model_class.from_pretrained(folder / "target", dtype=torch.float32)
    drafter = DFlashDraftModel.from_pretrained(folder / "drafter", dtype=torch.float32)
    return Pair(shape, target.eval().requires_grad_(False), drafter.eval().requires_grad_(False))


def _check_published_form(shape: Shape, folder: Path) -> None:
    config = json.loads((folder / "drafter" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    inner = config.get("dflash_config", {})
    assert ("block_size" in inner) == (shape.form == "inner")
    assert ("mask_token_id" in inner) == (shape.form != "flat")
    assert "num_target_layers" in config
    assert len(list((folder / "target").glob("*.safetensors"))) > 1 or not shape.sharded
