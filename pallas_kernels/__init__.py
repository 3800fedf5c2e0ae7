"""The ops of a step: one folder each, one file a backend. They know jax only."""
