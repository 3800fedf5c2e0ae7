"""What a layer is: frozen records of its positions, its mixer of tokens, and its MLP or experts.

Knows no model, no file format and no array.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jflash.records.moe_spec import (
    MoeSpec as MoeSpec,  # specs is the door to all records of a layer
)


def at_least_1(record: Any, *names: str) -> None:
    """ValueError for the first of these fields that is smaller."""
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
    `weightless`: the norms of queries and keys have no weights. `value_norm`: values are normed by
    head, without a weight. `shared_kv`: values are the keys before norm and rotation, and have no
    columns. If `shards` devices share the
    layer, its heads are one device's, and `copies` devices have the same key and value heads.
    `whole_out`: every device makes all columns of the layer's last product, and none is gathered;
    None where devices do not share the layer yet, and its size will say (`jflash.records.parts`).
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
    weightless: bool = False
    value_norm: bool = False
    shared_kv: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    shards: int = 1
    copies: int = 1
    whole_out: bool | None = None

    def __post_init__(self) -> None:
        at_least_1(self, "num_heads", "num_kv_heads", "head_dim")
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
    devices share the layer, its heads are one device's; `whole_out` is AttentionSpec's.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    shards: int = 1
    whole_out: bool | None = None

    def __post_init__(self) -> None:
        at_least_1(self, "num_key_heads", "num_value_heads", "key_dim", "value_dim", "taps")
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

    If `shards` devices share it, its size is one device's; `whole_out` is AttentionSpec's.
    """

    intermediate_size: int
    bias: bool = False
    activation: str = "silu"
    shards: int = 1
    whole_out: bool | None = None

    def __post_init__(self) -> None:
        at_least_1(self, "intermediate_size")


class Kept(NamedTuple):
    """How a weight stays quantised in memory; see pallas_kernels.matmul.kept.quantised."""

    form: str  # "fp8" or "int4"; "float8" of a drafter that was rounded
    group: int  # rows of the kernel that share a column's scale; 0: all
    scales: str  # their dtype
    zeros: bool  # each group has a zero
    fragments: bool = False  # in the order of pallas_kernels.matmul.kept.fragments
    pairs: bool = False  # there a gate's columns and an up's lie in turns

    @property
    def narrow(self) -> bool:
        """Whether codes of float8 become numbers of bfloat16 by a multiplication of such numbers,
        which is sooner than by float32's."""
        return self.form == "fp8" and self.scales == "bfloat16"


FLOAT8 = Kept("float8", 0, "float32", False)


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: a mixer of tokens and an MLP, each after a norm and with a residual.

    `sandwich`: a norm also follows each, before its output is added. With it these norms may have
    an epsilon of their own, `eps_after`, the layer may have experts `beside` the MLP, and if
    `scaled` its output is multiplied by a learned number.
    `kept` names the layer's leaves that stay quantised in memory.
    """

    mixer: AttentionSpec | DeltaSpec
    mlp: DenseSpec | MoeSpec
    sandwich: bool = False
    eps_after: float | None = None
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
