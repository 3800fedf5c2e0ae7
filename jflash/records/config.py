"""What a model is: frozen records that `jflash.io` fills and every other module only reads.

Its layers are the records of `jflash/records/specs.py`. Knows no file format and no array. A value
that decodes wrongly if guessed has no default here.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from jflash.records.specs import (
    AttentionSpec,
    DeltaSpec,
    DenseSpec,
    Kept,
    LayerConfig,
    MoeSpec,
    RopeConfig,
    at_least_1,
)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The fields that targets and drafters share; families differ in the data of their layers.

    If `shards` devices share the model, each has a part of the vocabulary's rows and of every
    layer; `vocab_size` counts all rows.
    """

    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    dtype: str = "float32"  # of parameters and activations, as loaded or trained
    shards: int = 1

    def __post_init__(self) -> None:
        at_least_1(self, "vocab_size", "hidden_size", "num_layers", "max_position_embeddings")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def mixers(self) -> tuple[AttentionSpec, ...]:
        """The attention of the layers that attend."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, AttentionSpec))

    @property
    def deltas(self) -> tuple[DeltaSpec, ...]:
        """The delta nets of the layers that have one."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, DeltaSpec))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer that attends, None if it sees the whole context."""
        return tuple(mixer.window for mixer in self.mixers)

    @property
    def experts(self) -> tuple[MoeSpec, ...]:
        """The experts of the layers that have some."""
        return tuple(layer.moe for layer in self.layers if layer.moe is not None)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Which layers have experts."""
        return tuple(i for i, x in enumerate(self.layers) if x.moe is not None)

    @property
    def intermediate_size(self) -> int:
        """Columns of an MLP: a dense layer's, else those of all experts that a token goes to."""
        dense = [layer.mlp for layer in self.layers if isinstance(layer.mlp, DenseSpec)]
        if dense:
            return dense[0].intermediate_size
        return max(moe.experts_per_token * moe.intermediate_size for moe in self.experts)

    def attending[C](self: C, *changes: Mapping[str, Any]) -> C:
        """The model with other values of some fields of its mixers; `changes` has one per layer."""
        model: Any = self
        pairs = zip(model.layers, changes, strict=True)
        return replace(model, layers=tuple(layer.attending(**fields) for layer, fields in pairs))

    def keeping[C](self: C, kept: Mapping[str, Kept]) -> C:
        """The model with these leaves of its layers, by path, quantised in memory."""
        model: Any = self
        by_layer: list[list[tuple[str, Kept]]] = [[] for _ in model.layers]
        for path, form in kept.items():
            layer, leaf = path.split("/", 1)
            by_layer[int(layer.removeprefix("layers_"))].append((leaf, form))
        pairs = zip(model.layers, by_layer, strict=True)
        return replace(model, layers=tuple(replace(x, kept=tuple(k)) for x, k in pairs))

    def with_experts[C](self: C, moe: MoeSpec, layers: Collection[int]) -> C:
        """The model with experts in place of the MLPs of `layers`."""
        model: Any = self
        new = [replace(x, mlp=moe) if i in layers else x for i, x in enumerate(model.layers)]
        return replace(model, layers=tuple(new))

    @classmethod
    def alike[C](
        cls: type[C],
        *,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope: RopeConfig | None,
        intermediate_size: int,
        mlp_bias: bool = False,
        activation: str = "silu",
        sandwich: bool = False,
        **others: Any,
    ) -> C:
        """A model of layers all alike; `others` are fields of the mixers and of the model."""
        names = {field.name for field in fields(AttentionSpec)}
        mixer = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=rope,
            **{"scale": head_dim**-0.5} | {k: v for k, v in others.items() if k in names},
        )
        mlp = DenseSpec(intermediate_size=intermediate_size, bias=mlp_bias, activation=activation)
        layers = (LayerConfig(mixer=mixer, mlp=mlp, sandwich=sandwich),) * num_layers
        make: Any = cls
        return make(layers=layers, **{k: v for k, v in others.items() if k not in names})


@dataclass(frozen=True, kw_only=True)
class TargetConfig(DecoderConfig):
    """A decoder: families differ in their layers.

    `norm_shift`: a constant that files leave out of the norms' weights; with it these stay float32.
    `norm_dtype`: the norms' weights have it, not the model's. `unread_ids`: tokens that stand for
    images and videos, refused in a prompt. The target multiplies its embeddings by
    `embedding_scale`, or with `embedding_norm` norms them without a weight; a drafter may be given
    scaled ones, never normed ones. Its logits are multiplied by `logit_multiplier`, and then become
    cap · tanh(logit / cap) with the cap `logit_softcap`.
    """

    tie_embeddings: bool
    norm_shift: float = 0.0
    norm_dtype: str = ""
    unread_ids: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(DecoderConfig):
    """A DFlash drafter (version 1): layers, block, and how it meets its target.

    Its layers see the context, and of the block all rows unless they are causal or have a window.
    Embedding and head are the target's, but for drafters that bring both: `own_embedding`, and
    a head of `draft_vocab_size` tokens. `num_target_layers` is None where the file does not say it,
    and `input_embedding_scale` too: in a pair they are the target's then (`meeting`). `products`
    says how its products are rounded while it decodes, if they are; where `fragments` are asked
    for, its weights lie so if their sizes allow it.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    input_embedding_scale: float | None
    output_multiplier: float
    final_logit_softcapping: float | None
    own_embedding: bool = False
    draft_vocab_size: int | None = None
    products: Kept | None = None

    def meeting(self, target: TargetConfig) -> "DrafterConfig":
        """The config in a pair: drafters of a target that scales its rows were trained on these."""
        scale = self.input_embedding_scale
        if scale is None:
            scale = 1.0 if self.own_embedding else target.embedding_scale
        count = self.num_target_layers or target.num_layers
        return replace(self, input_embedding_scale=scale, num_target_layers=count)

    @property
    def has_head(self) -> bool:
        """Whether it drafts by a head of its own, brought or made, and not by its target's."""
        return self.draft_vocab_size is not None or self.products is not None

    @property
    def reads_logits(self) -> bool:
        """Whether its best drafts need more than the id of the target's head's largest logit."""
        changes = self.output_multiplier != 1 or bool(self.final_logit_softcapping)
        return changes or self.draft_vocab_size is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2:
            raise ValueError(f"block_size must be at least 2, got {self.block_size}")
        layers = self.num_target_layers or max(self.target_layer_ids, default=0) + 1
        bad = [i for i in self.target_layer_ids if not 0 <= i < layers]
        if bad or not self.target_layer_ids:
            raise ValueError(
                f"target_layer_ids {list(self.target_layer_ids)} must be within "
                f"0 … {layers - 1} (num_target_layers {self.num_target_layers})"
            )
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} is more than the vocabulary "
                f"of {self.vocab_size} tokens"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary "
                f"of {self.vocab_size} tokens"
            )


@dataclass(frozen=True, kw_only=True)
class Drafter2Config(DrafterConfig):
    """A DFlash 2 drafter: version 1 with convolutions and a selector among candidates."""

    conv_kernel_size: int  # taps of a convolution: a row itself and those before it
    conv_group_size: int  # channels that share a dynamic kernel
    selector_rank: int
    selector_top_k: int  # candidates of a place

    @property
    def reads_logits(self) -> bool:
        """Always: it chooses among the best."""
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_1(self, "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of conv_group_size "
                f"{self.conv_group_size}"
            )
        if self.selector_top_k > self.vocab_size:
            raise ValueError(
                f"selector_top_k {self.selector_top_k} is more than the vocabulary "
                f"of {self.vocab_size} tokens"
            )


def second_version(
    config: DrafterConfig,
    *,
    conv_kernel_size: int = 2,
    conv_group_size: int = 16,
    selector_rank: int = 256,
    selector_top_k: int = 16,
) -> Drafter2Config:
    """The DFlash 2 drafter of the same sizes; the defaults are the published drafters'."""
    return Drafter2Config(
        **{field.name: getattr(config, field.name) for field in fields(config)},
        conv_kernel_size=conv_kernel_size,
        conv_group_size=conv_group_size,
        selector_rank=selector_rank,
        selector_top_k=selector_top_k,
    )


def default_target_layer_ids(num_target_layers: int, num_drafter_layers: int) -> tuple[int, ...]:
    """Tapped layers of a drafter whose config names none (dflash 0.1.0, by Python's rounding)."""
    if num_drafter_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_drafter_layers - 1)) for i in range(num_drafter_layers))
