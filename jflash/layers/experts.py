"""A mixture-of-experts MLP: each token goes to k of E gated experts, chosen by a router.

Shapes are fixed: M tokens make M·k rows whatever the routing, sorted by expert on the device. A
token's bits depend only on that token: its k outputs are added in the order of its ranking, never
by a scatter, so the sum depends neither on its neighbours nor on the sorted places of its rows.
Axes: B batch, T tokens, D width, M = B·T, k experts a token, E experts, F an expert's width.
"""

import functools
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jflash.layers.gather import gather, of_owners, own_first
from jflash.layers.projections import Kernel
from jflash.layers.routes import route, route_by_sigmoid
from jflash.layers.sums import Sums, left, summed
from jflash.records.kernels import Kernels
from jflash.records.leaves import Leaf, declare, gate_up_leaf
from jflash.records.specs import MoeSpec
from pallas_kernels.fixed_order import rounded, row_sum
from pallas_kernels.grouped_matmul import (
    BY_TOKENS,
    beside,
    canonical,
    clamped_gate,
    grouped_gate_up,
    grouped_matmul,
    weighted_sum,
)
from pallas_kernels.grouped_matmul.sums import Shared, Weighed
from pallas_kernels.matmul import (
    Fragments,
    Unsummed,
    added,
    gate_up,
    gelu_times,
    head_logits,
    matmul,
    partial_products,
    sigmoid_times,
    silu_times,
)

ROUTING = "routing"  # of Flax's collections


class Experts(nn.Module):
    """Parameters: router [D, E], gate_up [E, D, 2F], down [E, F, D].

    A shared expert adds shared_gate_up, shared_down and, with a gate, shared_gate [D, 1]. For
    sigmoids the router is routes [E, D], with a correction [E]. Devices that share the layer have F
    columns of each expert's first product and some of D of its second one; or, over devices, each
    has some experts whole, and the shared expert's second product.
    """

    hidden_size: int
    config: MoeSpec

    def setup(self) -> None:
        c, width = self.config, self.hidden_size
        if c.scores == "sigmoid":  # of float32 logits, as a head's are
            self.routes = declare(self, "routes", Leaf((c.num_experts, width), ("routes", "embed")))
            correction = Leaf((c.num_experts,), ("routes",), dtype="float32")
            self.correction = declare(self, "correction", correction)
        else:
            self.router = Kernel(Leaf((width, c.num_experts), ("embed", "experts")), c.bias)
        both = gate_up_leaf(width, c.intermediate_size, c.cut)
        self.gate_up = Kernel(both.of_experts(c.held), c.bias)
        self.down = Kernel(self._down(c.intermediate_size * c.cut).of_experts(c.held), c.bias)
        if c.shared_size is not None:
            if c.shared_gated:
                self.shared_gate = Kernel(Leaf((width, 1), ("embed", "gate")))
            self.shared_gate_up = Kernel(gate_up_leaf(width, c.shared_size, c.shards))
            self.shared_down = Kernel(self._down(c.shared_size * c.shards))

    @nn.nowrap
    def _down(self, rows: int) -> Leaf:
        """A second product, from the columns of all devices to one device's."""
        width = self.hidden_size
        return Leaf((rows, width // self.config.cut), ("mlp", "embed"), whole=width)

    def __call__(
        self, x: Float[Array, "B T D"], residual: Float[Array, "B T D"] | None, kernels: Kernels
    ) -> Float[Array, "B T D"]:
        """The experts' weighted sum, added to `residual` if given.

        A token's outputs are weighted and added in float32 and rounded once.
        """
        return summed(self.unsummed(x, residual, kernels))

    def unsummed(self, x, residual, kernels: Kernels) -> Sums:
        """As `MLP.unsummed`: of columns that devices share, or by kernels that find an expert's
        rows; else the last kernel makes the sum."""
        cut, routed = self.config.cut, self._route(x.reshape(-1, x.shape[-1]), kernels)
        if cut > 1:
            own = self.mixed(x, *routed, None, kernels)
            return left(Unsummed(None, own), residual, cut, kernels.matmul)
        if residual is None or kernels.experts not in BY_TOKENS:
            return Unsummed(None, self.mixed(x, *routed, residual, kernels))
        return self._weighed(x.reshape(-1, x.shape[-1]), *routed, residual, kernels)

    def mixed(
        self,
        x: Float[Array, "B T D"],
        weights: Float[Array, "M k"],
        ids: Int[Array, "M k"],
        residual: Float[Array, "B T C"] | None,
        kernels: Kernels,
    ) -> Float[Array, "B T C"]:
        """This device's columns of the sum, as each token's experts and their weights are given."""
        flat = x.reshape(-1, x.shape[-1])
        if residual is not None:
            residual = residual.reshape(len(flat), -1)
        if kernels.experts in BY_TOKENS:
            out = canonical.expert_sum(*self._weighed(flat, weights, ids, residual, kernels))
        else:
            outputs, _, _ = self._outputs(flat, ids, kernels)
            out = self._added(flat, outputs, weights, residual, kernels)
        return out.reshape(*x.shape[:-1], -1)

    def _weighed(
        self,
        x: Float[Array, "M D"],
        weights: Float[Array, "M k"],
        ids: Int[Array, "M k"],
        residual: Float[Array, "*lead C"] | None,
        kernels: Kernels,
    ) -> Weighed:
        outputs, pieces, places = self._outputs(x, ids, kernels)
        shared = self._shared_pieces(x, pieces, kernels)
        return Weighed(outputs, weights, shared, residual, places)

    def _outputs(
        self, flat: Float[Array, "M D"], ids: Int[Array, "M k"], kernels: Kernels
    ) -> tuple[Any, Float[Array, "P M D"] | None, Int[Array, " R"] | None]:
        """The outputs of each token's experts, [M, k, D] unless there are places where they lie,
        and the pieces of a shared expert that was beside them."""
        c, over = self.config, self.config.shards // self.config.cut
        self.sow(ROUTING, "ids", ids)  # without effect unless the caller makes it mutable
        # Rows of other devices' experts belong to no expert here, and hold anything.
        own = own_first(ids, c.held, over)
        by_tokens, pieces, places = kernels.experts in BY_TOKENS, None, None
        if isinstance(self.gate_up.kernel, Fragments):
            first = self.gate_up
            inner = canonical.gate_up_of_fragments(flat, own, first.kernel, first.leaf.firsts)
            inner, places = inner._replace(rows=gather(inner.rows, c.cut)), inner.places
            outputs = canonical.down_of_fragments(inner, own, self.down.kernel)
        elif by_tokens and self._beside(flat, kernels):
            outputs, pieces = self._with_shared(flat, own)
        else:
            outputs = (self._by_tokens if by_tokens else self._by_expert)(flat, own, kernels)
        if places is None:
            outputs = of_owners(outputs.reshape(*ids.shape, -1), ids // c.held, over)
        return outputs, pieces, places

    def _by_tokens(
        self, x: Float[Array, "M D"], ids: Int[Array, "M k"], kernels: Kernels
    ) -> Float[Array, "R D"]:
        """The outputs of each token's experts, by kernels that find an expert's rows."""
        c, first, down = self.config, self.gate_up, self.down
        tiles, R = canonical.tiles_of_tokens(ids, c.held), ids.size
        biases = (first.bias, down.bias) if c.bias else (None, None)
        if c.activation == "gelu_tanh" and not c.clamped:
            both = canonical.of_tokens(x, first.kernel, tiles, R, biases[0])
            inner = gelu_times(*first.leaf.parts(both), backend=kernels.matmul)
        else:
            gate = canonical.GATES["clamped" if c.clamped else "silu"]
            both = (biases[0], first.leaf.firsts, gate)
            inner = canonical.of_tokens(x, first.kernel, tiles, R, *both)
        return canonical.of_tokens(gather(inner, c.cut), down.kernel, tiles, R, biases[1])

    def _by_expert(
        self, x: Float[Array, "M D"], ids: Int[Array, "M k"], kernels: Kernels
    ) -> Float[Array, "R D"]:
        """The outputs of each token's experts, whose rows are sorted by expert and brought back."""
        # Rows of no expert here come last.
        order = jnp.argsort(ids.reshape(-1), stable=True)
        sizes = jnp.sum(ids.reshape(-1, 1) == jnp.arange(self.config.held), axis=0)
        rows, experts = x[order // ids.shape[1]], ids.reshape(-1)[order]
        return self._experts(rows, experts, sizes, kernels)[jnp.argsort(order)]

    @nn.nowrap
    def _beside(self, x: Float[Array, "M D"], kernels: Kernels) -> bool:
        """Whether a gated shared expert's products go with the others', of the same bits."""
        c = self.config
        if c.shared_size is None or not c.shared_gated or kernels.matmul != "canonical":
            return False
        if c.bias or c.clamped or c.activation != "silu":
            return False
        pairs = (self.gate_up, self.shared_gate_up), (self.down, self.shared_down)
        return all(beside.fits(len(x), own.kernel, shared.kernel) for own, shared in pairs)

    def _with_shared(
        self, x: Float[Array, "M D"], ids: Int[Array, "M k"]
    ) -> tuple[Float[Array, "R D"], Float[Array, "P M D"]]:
        """The outputs of each token's experts, and the pieces of the shared one's."""
        c, first, down = self.config, self.gate_up, self.down
        both, last = self.shared_gate_up, self.shared_down
        tiles, R = canonical.tiles_of_tokens(ids, c.held), ids.size
        firsts = first.leaf.firsts, both.leaf.firsts
        inner, own = beside.gate_up(x, first.kernel, tiles, R, both.kernel, firsts)
        inner, own = gather(inner, c.cut), gather(own, c.shards)
        columns = last.leaf.columns
        return beside.matmul(inner, down.kernel, tiles, R, own, last.kernel, columns)

    def _shared_pieces(
        self, x: Float[Array, "M D"], pieces: Float[Array, "P M D"] | None, kernels: Kernels
    ) -> Shared | None:
        """What `expert_sum` adds for a shared expert, whose pieces may have been made."""
        if self.config.shared_size is None:
            return None
        if pieces is None:
            down, backend = self.shared_down, kernels.matmul
            inner, columns = self._shared_inner(x, backend), down.leaf.columns
            pieces = partial_products(inner, down.kernel, backend=backend, columns=columns)
        gate = (x, self.shared_gate.kernel[:, 0]) if self.config.shared_gated else ()
        return Shared(pieces, *gate)

    def _added(
        self,
        x: Float[Array, "M D"],
        outputs: Float[Array, "M k D"],
        weights: Float[Array, "M k"],
        residual: Float[Array, "M D"] | None,
        kernels: Kernels,
    ) -> Float[Array, "M D"]:
        """The weighted sum, the shared expert's output and the residual."""
        out = weighted_sum(outputs, weights, backend=kernels.experts).astype(x.dtype)
        if self.config.shared_size is not None:
            out = added(out, self._shared(x, kernels.matmul), backend=kernels.matmul)
        if residual is not None:
            out = added(residual, out, backend=kernels.matmul)
        return out

    def _route(
        self, x: Float[Array, "M D"], kernels: Kernels
    ) -> tuple[Float[Array, "M k"], Int[Array, "M k"]]:
        """Each token's experts and their weights; see `route`."""
        if self.config.scores == "sigmoid":
            logits = head_logits(x, self.routes, backend=kernels.matmul)
            return route_by_sigmoid(logits, self.correction, self.config, kernels.experts)
        if kernels.experts in BY_TOKENS:
            c, bias = self.config, self.router.bias if self.config.bias else None
            pieces = partial_products(x, self.router.kernel, backend=kernels.matmul)
            kind = {"chosen": c.scores == "softmax of the chosen", "renormalise": c.renormalise}
            return canonical.route(pieces, bias, k=c.experts_per_token, **kind)
        logits = matmul(x, self.router.kernel, backend=kernels.matmul)
        if self.config.bias:
            logits = added(logits, self.router.bias, backend=kernels.matmul)
        return route(logits, self.config, kernels.experts)

    def _experts(
        self,
        rows: Float[Array, "R D"],
        ids: Int[Array, " R"],
        sizes: Int[Array, " E"],
        kernels: Kernels,
    ) -> Float[Array, "R D"]:
        """Each row's output of its expert, whose id is in `ids`, in ascending order."""
        products = functools.partial(grouped_matmul, backend=kernels.experts)
        first, backend = self.gate_up, kernels.matmul
        gelu = self.config.activation == "gelu_tanh"
        if not (self.config.bias or self.config.clamped or gelu):
            inner = grouped_gate_up(
                rows, first.kernel, sizes, first.leaf.firsts, backend=kernels.experts
            )
            return products(gather(inner, self.config.cut), self.down.kernel, sizes)
        both = products(rows, first.kernel, sizes)
        if self.config.bias:
            both = added(both, first.bias[ids], backend=backend)
        gate, up = first.leaf.parts(both)
        if self.config.clamped:
            inner = clamped_gate(gate, up, backend=kernels.experts)
        else:
            inner = (gelu_times if gelu else silu_times)(gate, up, backend=backend)
        outer = products(gather(inner, self.config.cut), self.down.kernel, sizes)
        return added(outer, self.down.bias[ids], backend=backend) if self.config.bias else outer

    def _shared_inner(self, x: Float[Array, "M D"], backend: str) -> Float[Array, "M F"]:
        both, shards = self.shared_gate_up, self.config.shards
        return gather(gate_up(x, both.kernel, both.leaf.firsts, backend=backend), shards)

    def _shared(self, x: Float[Array, "M D"], backend: str) -> Float[Array, "M D"]:
        """The shared expert's output, times any gate, whose logit is summed in a fixed order."""
        inner, down = self._shared_inner(x, backend), self.shared_down
        out = matmul(inner, down.kernel, backend=backend, columns=down.leaf.columns)
        if not self.config.shared_gated:
            return out
        column = self.shared_gate.kernel[:, 0].astype(jnp.float32)
        gate = row_sum(rounded(x.astype(jnp.float32) * column)).astype(x.dtype)
        return sigmoid_times(gate, out, backend=backend)
