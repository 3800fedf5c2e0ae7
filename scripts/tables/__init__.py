"""The tables of README, LOSSLESS.md and the cards, made from committed results."""
