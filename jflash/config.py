"""What a model is: frozen records that `jflash.io` fills and every other module only reads.

Knows no file format and no array. A value that decodes wrongly if guessed has no default here.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple


def _at_least_1(record: Any, *names: str) -> None:
    for name in names:
        if getattr(record, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(record, name)}")


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's frequency scaling (`rope_type: llama3`), by wavelength in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor` (`rope_type: linear`)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (`rope_type: yarn`): frequencies between two bounds, in turns, are slowed in proportion.

    `attention_factor` multiplies the cosines and sines; `truncate` makes the bounds whole numbers.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, kw_only=True)
class ProportionalScaling:
    """The first `turning` of a head's H/2 frequencies, divided by `factor`; the others are 0.

    (`rope_type: proportional`, Gemma 4's layers without a window.)
    """

    turning: int
    factor: float


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base frequency, scaling for long contexts, and rotated dims.

    `rotary_dim`: the number of rotated dims of a head, None for all. They are the first
    rotary_dim / 2 of each half. `in_pairs`: files have the two of a rotation side by side.
    """

    theta: float
    scaling: Llama3Scaling | LinearScaling | YarnScaling | ProportionalScaling | None
    rotary_dim: int | None = None
    in_pairs: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One layer's attention: its heads, positions and masks.

    `window`: keys fewer than that many positions away, on both sides unless `causal`. `causal`: no
    key after the row itself. A score is q·k · `scale`, with a `softcap` softcap · tanh(score /
    softcap); `sinks`: each head's softmax has one more, learned logit without a value. `gated`:
    the layer projects a gate beside the queries, and its σ multiplies the heads' outputs.
    `value_norm`: values are normed by head, without a weight. `shared_kv`: values are the keys
    before norm and rotation, and have no columns of their own. If `shards` devices share the
    layer, its heads are one device's, and `copies` devices have the same key and value heads.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None  # None: no position embedding
    scale: float
    window: int | None = None
    causal: bool = True
    softcap: float | None = None
    sinks: bool = False
    gated: bool = False
    qk_norm: bool = False
    norm_all_heads: bool = False  # at once, not each
    value_norm: bool = False
    shared_kv: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    shards: int = 1
    copies: int = 1

    def __post_init__(self) -> None:
        _at_least_1(self, "num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"sliding_window must be at least 1, got {self.window}")

    @property
    def groups(self) -> int:
        """Query heads that share a key and value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_width(self) -> int:
        """Columns of a layer's keys and values together."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def out_width(self) -> int:
        """Columns of all heads."""
        return self.num_heads * self.head_dim

    @property
    def inputs_width(self) -> int:
        """Columns of the fused projection: queries, keys, values, and the gate if there is one."""
        keys_values = self.kv_width // 2 if self.shared_kv else self.kv_width
        return (1 + self.gated) * self.num_heads * self.head_dim + keys_values

    @property
    def whole(self) -> "AttentionSpec":
        """The layer that the devices share."""
        kv_heads = self.num_kv_heads * self.shards // self.copies
        heads = self.num_heads * self.shards
        return replace(self, num_heads=heads, num_kv_heads=kv_heads, shards=1, copies=1)


@dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """One layer's gated delta net in place of attention: a state a value head, and a convolution.

    Value heads share key heads in runs; `taps` is the length of the convolution. If `shards`
    devices share the layer, its heads are one device's.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    shards: int = 1

    def __post_init__(self) -> None:
        _at_least_1(self, "num_key_heads", "num_value_heads", "key_dim", "value_dim", "taps")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads {self.num_value_heads} is not a multiple of "
                f"linear_num_key_heads {self.num_key_heads}"
            )

    @property
    def mixed_width(self) -> int:
        """Columns that are convolved: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.out_width

    @property
    def out_width(self) -> int:
        """Columns of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def inputs_width(self) -> int:
        """Columns of the fused projection: what is convolved, the gate z, and b and a of a head."""
        return self.mixed_width + self.out_width + 2 * self.num_value_heads


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """A gated MLP: down(activation(gate) · up). `gelu_tanh` is GELU by its tanh formula.

    If `shards` devices share it, its size is one device's.
    """

    intermediate_size: int
    bias: bool = False
    activation: str = "silu"
    shards: int = 1

    def __post_init__(self) -> None:
        _at_least_1(self, "intermediate_size")


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Experts in place of an MLP; `intermediate_size` is that of one expert.

    `shared_size`: that of an expert for every token; `shared_gated`: σ of a logit multiplies it.
    `scores`: a token's weights are the softmax over all experts, or over its chosen ones, or
    sigmoids, which choose with a learned correction added; and `scale` multiplies them. With
    `groups` a token goes to the `kept_groups` runs of experts whose two best scores add up to most.
    `clamped`: the activation is gpt-oss's in place of SwiGLU. `bias`: of the router and of both
    products of an expert. If `shards` devices share the layer, each has a part of every expert, and
    sizes are one device's.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    renormalise: bool  # the weights of a token's experts add up to 1
    shared_size: int | None = None
    shared_gated: bool = True
    scores: Literal["softmax", "softmax of the chosen", "sigmoid"] = "softmax"
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0
    clamped: bool = False
    activation: str = "silu"  # as DenseSpec's, unless `clamped`
    bias: bool = False
    shards: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.experts_per_token} must be within "
                f"1 … {self.num_experts} (num_experts)"
            )
        each, left = divmod(self.num_experts, self.groups)
        if left or not 1 <= self.kept_groups <= self.groups or (self.groups > 1 and each < 2):
            raise ValueError(
                f"n_group {self.groups}, topk_group {self.kept_groups}: {self.num_experts} experts "
                "need equal groups of 2 or more, of which some are kept"
            )
        if self.experts_per_token > each * self.kept_groups:
            raise ValueError(
                f"num_experts_per_tok {self.experts_per_token} is more than the "
                f"{each * self.kept_groups} experts of topk_group {self.kept_groups}"
            )


class Kept(NamedTuple):
    """How a weight stays quantised in memory; see pallas_kernels.matmul.quantised."""

    form: str  # "fp8" or "int4"
    group: int  # rows of the kernel that share a column's scale
    scales: str  # their dtype
    zeros: bool  # each group has a zero


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: a mixer of tokens and an MLP, each after a norm and with a residual.

    `sandwich`: a norm also follows each, before its output is added. With it the layer may have
    experts `beside` the MLP, and if `scaled` its output is multiplied by a learned number.
    `kept` names the layer's leaves that stay quantised in memory.
    """

    mixer: AttentionSpec | DeltaSpec
    mlp: DenseSpec | MoeSpec
    sandwich: bool = False
    kept: tuple[tuple[str, Kept], ...] = ()
    beside: MoeSpec | None = None
    scaled: bool = False

    @property
    def moe(self) -> MoeSpec | None:
        """The experts, in place of the MLP or beside it."""
        return self.mlp if isinstance(self.mlp, MoeSpec) else self.beside

    @property
    def experts_name(self) -> str:
        """The name of the module that has the experts."""
        return "mlp" if isinstance(self.mlp, MoeSpec) else "experts"

    def attending(self, **changes: Any) -> "LayerConfig":
        """The layer with other values of some fields of its mixer."""
        return replace(self, mixer=replace(self.mixer, **changes))


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
        _at_least_1(self, "vocab_size", "hidden_size", "num_layers", "max_position_embeddings")

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
    images and videos, refused in a prompt. The target multiplies its own embeddings by
    `embedding_scale`, and its logits become cap · tanh(logit / cap) with the cap `logit_softcap`.
    """

    tie_embeddings: bool
    norm_shift: float = 0.0
    norm_dtype: str = ""
    unread_ids: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    logit_softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(DecoderConfig):
    """A DFlash drafter (version 1): layers, block, and how it meets its target.

    Its layers see the context, and of the block all rows unless they are causal or have a window.
    Embedding and head are the target's, but for drafters that bring their own: `own_embedding`, and
    a head of `draft_vocab_size` tokens. `num_target_layers` is None where the file does not say it,
    and `input_embedding_scale` too: in a pair it is the target's then (`meeting`).
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

    def meeting(self, target: TargetConfig) -> "DrafterConfig":
        """The config in a pair: drafters of a target that scales its rows were trained on these."""
        if self.input_embedding_scale is not None:
            return self
        scale = 1.0 if self.own_embedding else target.embedding_scale
        return replace(self, input_embedding_scale=scale)

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
        if len(set(self.target_layer_ids)) != len(self.target_layer_ids):
            raise ValueError(f"target_layer_ids {list(self.target_layer_ids)} repeat a layer")
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
        _at_least_1(self, "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
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
    """Tapped layers of a drafter whose config names none (dflash 0.1.0, Python's own rounding)."""
    if num_drafter_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_drafter_layers - 1)) for i in range(num_drafter_layers))
