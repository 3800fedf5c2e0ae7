"""What a model is: frozen records that `jflash.io` fills and every other module only reads.

Knows no file format and no array. A value that decodes wrongly if guessed has no default here.
"""

from dataclasses import dataclass, fields


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
class RopeConfig:
    """Rotary position embedding: base frequency and how long contexts scale it."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | YarnScaling | None


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What a row of a drafter's layer sees; by default the context and its whole block.

    `window` w: what is less than w positions away, ahead too unless `causal`. Causal: nothing
    behind its own row of the block.
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The trunk that targets and drafters share: sizes, norms, biases and positions."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*sizes, "num_kv_heads", "head_dim", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Experts in place of the MLP of some layers; `intermediate_size` is that of one expert."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    renormalise: bool  # the weights of a token's experts add up to 1
    sparse_layers: tuple[int, ...]  # layers with experts; the others keep the dense MLP

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.experts_per_token} must be within "
                f"1 … {self.num_experts} (num_experts)"
            )


@dataclass(frozen=True, kw_only=True)
class TargetConfig(DecoderConfig):
    """A decoder: Qwen3, Qwen3-MoE, Qwen2/2.5, Llama 3.x and Mistral differ only in these fields."""

    tie_embeddings: bool
    moe: MoeConfig | None = None  # a dense decoder's

    def moe_of(self, layer: int) -> MoeConfig | None:
        """The experts of a layer; None if its MLP is dense."""
        return self.moe if self.moe and layer in self.moe.sparse_layers else None


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(DecoderConfig):
    """A DFlash drafter (version 1): trunk, block, what its layers see, and how it meets its target.

    `sights` has one entry a layer, or none if every layer sees the whole context and block.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    sights: tuple[Sight, ...] = ()

    def sight(self, layer: int) -> Sight:
        """What the rows of a layer see."""
        return self.sights[layer] if self.sights else Sight()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer, None of one that sees the whole context."""
        return tuple(self.sight(i).window for i in range(self.num_layers))

    @property
    def changes_logits(self) -> bool:
        """Whether the drafter's logits differ from the head's own."""
        return self.output_multiplier != 1 or bool(self.final_logit_softcapping)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2:
            raise ValueError(f"block_size must be at least 2, got {self.block_size}")
        bad = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if bad or not self.target_layer_ids:
            raise ValueError(
                f"target_layer_ids {list(self.target_layer_ids)} must be within "
                f"0 … {self.num_target_layers - 1} (num_target_layers {self.num_target_layers})"
            )
        if self.sights and len(self.sights) != self.num_layers:
            raise ValueError(f"{len(self.sights)} layer_types for {self.num_layers} layers")
        if any(sight.window is not None and sight.window < 1 for sight in self.sights):
            raise ValueError(f"sliding_window must be at least 1: {list(self.sights)}")
        if len(set(self.target_layer_ids)) != len(self.target_layer_ids):
            raise ValueError(f"target_layer_ids {list(self.target_layer_ids)} repeat a layer")
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

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
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
