"""Finds texts that share a run of words with a test set."""

from collections.abc import Iterable


def _runs(text: str, n: int) -> set[tuple[str, ...]]:
    words = text.casefold().split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def overlap(texts: Iterable[str], reference_texts: Iterable[str], n: int = 13) -> list[str]:
    """Those of texts that share a run of n words with a reference text, such as a test set.

    Words are what whitespace separates, and case does not matter; a text of fewer than n words
    has no run and is never returned.
    """
    reference = set[tuple[str, ...]]().union(*(_runs(text, n) for text in reference_texts))
    return [text for text in texts if not reference.isdisjoint(_runs(text, n))]
