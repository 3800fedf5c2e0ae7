"""What a layer's experts are: a frozen record of their sizes, their router, and who has them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Experts in place of an MLP; `intermediate_size` is that of one expert.

    `shared_size`: that of an expert for every token; `shared_gated`: σ of a logit multiplies it.
    `scores`: a token's weights are the softmax over all experts, or over its chosen ones, or
    sigmoids, which choose with a learned correction added; and `scale` multiplies them. With
    `groups` a token goes to the `kept_groups` runs of experts whose two best scores add up to most.
    `clamped`: the activation is gpt-oss's in place of SwiGLU. `bias`: of the router and of both
    products of an expert. If `shards` devices share the layer, each has some `columns` of every
    expert, and sizes are one device's; or the experts lie over `devices`, each whole on one.
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
    over: Literal["columns", "devices"] = "columns"

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

    @property
    def cut(self) -> int:
        """Devices that each have some columns of an expert."""
        return self.shards if self.over == "columns" else 1

    @property
    def held(self) -> int:
        """Experts of which one device has some or all columns."""
        return self.num_experts * self.cut // self.shards
