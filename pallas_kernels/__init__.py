"""Attention operations of jflash: one folder an op, one file a backend. Knows jax only."""
