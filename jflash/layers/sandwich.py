"""The decoder layer with norms before and after attention and MLP (Gemma 3 and 4, Muse).

Gemma 4 also has experts beside the MLP, which are routed by the residual itself, and a number that
multiplies the layer's output.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash.layers.experts import Experts
from jflash.layers.gather import gather
from jflash.layers.layer import MLP, DecoderLayer
from jflash.layers.newest import rows_read
from jflash.layers.passes import Pass
from jflash.layers.projections import RMSNorm
from jflash.layers.sums import Sums
from jflash.records.kernels import Kernels
from jflash.records.leaves import Leaf, declare
from jflash.records.specs import DenseSpec
from pallas_kernels.fixed_order import rounded
from pallas_kernels.matmul import Unsummed, added
from pallas_kernels.rms_norm import rms_norm


class ExpertsBeside(Experts):
    """Experts whose router sees another input, by another norm, and scales their weights.

    More parameters: router_scale [D], expert_scale [E].
    """

    eps: float = 0.0

    def setup(self) -> None:
        super().setup()
        width, experts = self.hidden_size, self.config.num_experts
        self.router_scale = declare(self, "router_scale", Leaf((width,), ("embed",)))
        self.expert_scale = declare(self, "expert_scale", Leaf((experts,), ("expert_scales",)))

    def routed_by(
        self, residual: Float[Array, "B T D"], x: Float[Array, "B T D"], kernels: Kernels
    ) -> Float[Array, "B T D"]:
        """The experts' weighted sum of x, chosen and weighted by the residual."""
        flat = residual.reshape(-1, residual.shape[-1])
        scale = rounded(self.router_scale.astype(jnp.float32) * self.hidden_size**-0.5)
        normed = rms_norm(flat, scale, self.eps, backend=kernels.norm)
        weights, ids = self._route(normed, kernels)
        weights = rounded(weights * self.expert_scale.astype(jnp.float32)[ids])
        return gather(self.mixed(x, weights, ids, None, kernels), self.config.cut)


class SandwichLayer(DecoderLayer):
    """Attention and a dense MLP, whose outputs are normed before they are added."""

    def setup(self) -> None:
        c, width = self.config, self.hidden_size
        assert isinstance(c.mlp, DenseSpec)
        self.input_norm = self.make_norm()
        self.attention = self.make_mixer()
        self.attention_norm = self.make_norm(c.eps_after)
        self.mlp_input_norm = self.make_norm()
        self.mlp = MLP(c.mlp, width)
        self.mlp_norm = self.make_norm(c.eps_after)
        if c.beside is not None:
            self.dense_norm = self.make_norm()
            self.experts_input_norm = self.make_norm()
            self.experts = ExpertsBeside(width, c.beside, self.eps)
            self.experts_norm = self.make_norm()
        if c.scaled:
            self.scalar = declare(self, "scalar", Leaf((1,), ("one",)))

    def make_norm(self, eps: float | None = None) -> RMSNorm:
        return RMSNorm(self.hidden_size, eps or self.eps, dtype=self.norm_dtype)

    def __call__(self, given: Sums, positions, cache, over: Pass):
        norm, backend = over.kernels.norm, over.kernels.matmul
        entered, normed = self.input_norm.after(given, norm)
        out, cache = self.attention(normed, positions, cache, over, None)
        residual = rows_read(over, entered)
        x = added(residual, self.attention_norm(out, norm), backend=backend)
        out = self.mlp(self.mlp_input_norm(x, norm), None, over.kernels)
        if self.config.beside is not None:
            other = self.experts.routed_by(x, self.experts_input_norm(x, norm), over.kernels)
            both = self.dense_norm(out, norm), self.experts_norm(other, norm)
            out = added(*both, backend=backend)
        x = added(x, self.mlp_norm(out, norm), backend=backend)
        x = rounded(x * self.scalar) if self.config.scaled else x
        return entered, Unsummed(None, x), cache
