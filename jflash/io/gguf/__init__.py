"""GGUF files: their header, and from it a config, weights and a tokenizer."""
