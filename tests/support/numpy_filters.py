"""Temperature, top-k, top-p and min-p by sorting, in float64: what sampling must equal."""

import numpy as np

from jflash.records.decoding import Sampling


def filtered(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Probabilities over the last axis; ties at a boundary are all kept."""
    flat = np.asarray(logits, np.float64).reshape(-1, logits.shape[-1])
    return np.stack([_row(row, sampling) for row in flat]).reshape(logits.shape)


def _row(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    if sampling.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    p = np.exp((logits - logits.max()) / sampling.temperature)
    if sampling.top_k:
        p = np.where(p < np.sort(p)[::-1][: sampling.top_k][-1], 0, p)
    p = p / p.sum()
    if sampling.top_p < 1:
        falling = np.sort(p)[::-1]
        enough = np.flatnonzero(np.cumsum(falling) >= sampling.top_p)[0]
        p = np.where(p < falling[enough], 0, p)
    p = np.where(p < sampling.min_p * p.max(), 0, p)
    return p / p.sum()
