"""Quantised checkpoints: one module a format, from stored tensors to numbers.

Scales of activations are never applied: only weights are quantised here.
"""
