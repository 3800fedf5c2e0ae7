"""What is compiled into a step, and the parameters that it runs on."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.models.float8 import rounding
from jflash.records.config import DrafterConfig, TargetConfig
from jflash.records.decoding import DRAFT_RULES, whole
from jflash.records.kernels import ONE_ARITHMETIC, XLA, Kernels
from pallas_kernels.gated_delta import CHUNK


@dataclass(frozen=True)
class Models:
    """What is compiled: two modules, the block width W, the kernels, and how draws are done.

    Without a drafter nothing is drafted and each step commits one token, at any width. Unless
    `sampled`, every request is greedy, and so are the drafts, whatever the draft rule. `rows` are
    those that a step verifies over the whole batch, all with None; with as many as there are
    sequences nothing is drafted, and the drafter's context is still written. With recurrent layers
    each sequence has as many of them, so what does not divide is left out.
    """

    target: Target
    drafter: Drafter | None = None
    block_size: int = 1
    kernels: Kernels = XLA
    sampled: bool = False
    draft_rule: str = "sampled"
    rows: int | str | None = None  # AUTO stands for the numbers that a driver chooses from
    mesh: Mesh | None = None  # of the devices that share the models; see jflash.devices.mesh

    def __post_init__(self) -> None:
        largest = self.drafter.config.block_size if self.drafter else self.block_size
        smallest = 2 if self.drafter else 1
        if not smallest <= whole("block size", self.block_size) <= largest:
            raise ValueError(
                f"block size {self.block_size} must be within {smallest} … {largest} "
                "(a drafter may run narrower than it was trained, never wider)"
            )
        if self.target.config.deltas and self.block_size > CHUNK:
            raise ValueError(
                f"block size {self.block_size} is above {CHUNK}, the most that a target with "
                "recurrent layers takes"
            )
        if self.draft_rule not in DRAFT_RULES:
            raise ValueError(f"draft rule {self.draft_rule!r}: {' or '.join(DRAFT_RULES)}")
        if self.rows is not None:
            self._check_rows()

    def _check_rows(self) -> None:
        if self.drafter is None:
            raise ValueError(f"{self.rows} rows to verify: without a drafter there are no drafts")
        if not self.one_arithmetic:
            others = set(ONE_ARITHMETIC) - self.kernels.one_arithmetic
            used = (f"{op} {name}" for op, name in self.kernels._asdict().items() if op in others)
            raise ValueError(
                f"{self.rows} rows to verify: by {', '.join(used)} a token's bits hang on the "
                "number of rows; only kernels of one arithmetic may verify fewer"
            )

    @property
    def configs(self) -> tuple[TargetConfig | DrafterConfig, ...]:
        """The target's, then the drafter's if there is one."""
        return tuple(model.config for model in (self.target, self.drafter) if model is not None)

    @property
    def dtype(self) -> str:
        """What parameters, activations and caches are."""
        return self.target.config.dtype

    @property
    def one_arithmetic(self) -> bool:
        """Whether a token's bits are the same at every width, batch, capacity and chunk."""
        c = self.target.config
        absent = {op for op, there in (("experts", c.experts), ("delta", c.deltas)) if not there}
        return set(ONE_ARITHMETIC) - absent <= self.kernels.one_arithmetic

    @property
    def ranks_rows(self) -> bool:
        """Whether the drafter's confidence says which rows of the batch are verified."""
        return self.rows is not None and not self.target.config.deltas

    @property
    def draws_drafts(self) -> bool:
        return self.drafter is not None and self.sampled and self.draft_rule == "sampled"

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.config.target_layer_ids if self.drafter else ()

    @property
    def max_accept(self) -> int:
        """The most drafts that a step can accept."""
        return self.block_size - 1 if self.drafter else 0

    def of_dtype(self, dtype: str) -> "Models":
        """The same models, in another dtype."""

        def cast(model: Any) -> Any:
            return model and model.clone(config=replace(model.config, dtype=dtype))

        return replace(self, target=cast(self.target), drafter=cast(self.drafter))

    def drafting_in(self, dtype: str, batch: int | None = None) -> "Models":
        """The models, whose drafter's products are rounded to 'float8', or with '' are not.

        Its weights should lie as steps of `batch` sequences read them soonest. ValueError for
        another dtype, and for one without a drafter.
        """
        if self.drafter is None:
            if dtype:
                raise ValueError(f"drafter_dtype {dtype!r} without a drafter")
            return self
        products = rounding(dtype, batch and batch * self.block_size)
        config = replace(self.drafter.config, products=products)
        return replace(self, drafter=self.drafter.clone(config=config))

    def plain(self) -> "Models":
        """The target at width 1: plain decoding, which a pair is measured against."""
        return replace(self, drafter=None, block_size=1, rows=None)

    def width(self, batch: int) -> int:
        """Rows of a block: 1 where a step verifies only the anchors."""
        return 1 if self.rows == batch else self.block_size


class Params(NamedTuple):
    """Parameters of both models, plain pytrees; the drafter's is None without one."""

    target: Any
    drafter: Any = None
