"""RoPE frequencies and factors of transformers, into tests/golden/rope.json. Needs torch, not JAX.

python tests/reference/record_rope.py
"""

import json
from pathlib import Path

from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

THETA, SIZES = 50000.0, {"head_dim": 64, "max_position_embeddings": 32768}
YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,
    "yarn with its own factor": YARN | {"attention_factor": 1.25, "truncate": False},
    "yarn of gpt-oss": YARN | {"factor": 32.0, "beta_fast": 32.0, "truncate": False},
    "yarn of kimi": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
                            "mscale_all_dim": 1.0},
    "yarn of deepseek": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn with mscale alone": YARN | {"mscale": 0.5},
    "yarn of a short context": YARN | {"original_max_position_embeddings": 8, "beta_slow": 4.0},
    # `beta_slow` turns lie past the frequencies of half a head, and past a whole head's.
    "yarn of a long context": YARN | {"original_max_position_embeddings": 2**20},
    "yarn of an endless context": YARN | {"original_max_position_embeddings": 2**44},
    "yarn that says little": {"rope_type": "yarn", "factor": 4.0},
}  # fmt: skip


def main() -> None:
    found = {}
    for name, given in ROPES.items():
        config = Qwen3Config(**SIZES, rope_parameters=given | {"rope_theta": THETA})
        rope = Qwen3RotaryEmbedding(config)
        found[name] = {
            "rope_parameters": given,
            "rope_theta": THETA,
            "sizes": SIZES,
            "attention_scaling": rope.attention_scaling,
            "inv_freq": [float(f"{x:.8g}") for x in rope.inv_freq.tolist()],
        }
    path = Path(__file__).parents[1] / "golden" / "rope.json"
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items())
    path.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
