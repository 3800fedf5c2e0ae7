"""The names of the pairs that the lossless check decodes, and of the forms of kept codes;
jflash.proof.cases makes the pairs."""

# Pair → its share of the tokens; large pairs (see jflash.bench.shapes) are slow and get less.
PAIRS = {"tiny-math": 2, "qwen3-8b": 1}
PAIRS |= dict.fromkeys(("qwen3-8b-window", "qwen3-8b-dflash2", "qwen3-coder-30b"), 1)
PAIRS |= dict.fromkeys(("qwen3.5-27b", "qwen3.5-35b-a3b", "gpt-oss-20b", "gemma-3-12b"), 1)
PAIRS |= dict.fromkeys(("gemma-4-31b", "gemma-4-26b-a4b", "muse-glimmer-30b"), 1)
PAIRS |= dict.fromkeys(("qwen2.5-7b", "llama-3.1-8b", "mistral-7b", "glm-4-32b"), 1)
PAIRS |= dict.fromkeys(("qwen3-32b", "qwen3-coder-next", "glm-4.5-air", "minimax-m2"), 1)
FORMS = ("fp8", "int4")  # of random codes
