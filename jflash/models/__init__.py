"""The target and the drafters: pure Flax modules, whose caches go in and out."""
