"""The decoder layer with norms before and after attention and MLP (Gemma 3)."""

from jflash.config import DenseSpec
from jflash.layers import MLP, DecoderLayer, RMSNorm
from jflash.passes import Pass
from pallas_kernels.matmul import added


class SandwichLayer(DecoderLayer):
    """Attention and a dense MLP, whose outputs are normed before they are added."""

    def setup(self) -> None:
        c, width = self.config, self.hidden_size
        assert isinstance(c.mlp, DenseSpec)
        self.input_norm = self.make_norm()
        self.attention = self.make_mixer()
        self.attention_norm = self.make_norm()
        self.mlp_input_norm = self.make_norm()
        self.mlp = MLP(c.mlp, width)
        self.mlp_norm = self.make_norm()

    def make_norm(self) -> RMSNorm:
        return RMSNorm(self.hidden_size, self.eps, dtype=self.norm_dtype)

    def __call__(self, x, positions, cache, over: Pass):
        norm, matmul = over.kernels.norm, over.kernels.matmul
        out, cache = self.attention(self.input_norm(x, norm), positions, cache, over, None)
        x = added(x, self.attention_norm(out, norm), backend=matmul)
        out = self.mlp(self.mlp_input_norm(x, norm), None, over.kernels)
        return added(x, self.mlp_norm(out, norm), backend=matmul), cache
