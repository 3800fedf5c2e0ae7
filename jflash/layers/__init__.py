"""The parts of a model: norms, attention, MLPs, experts, delta nets, heads, and what they keep.

`layer` has the usual layer, `sandwich` and `delta` have others, and `head` what follows the last
one. A layer works on a pass (`passes`), which knows how its state (`cache`) lies in memory; what
devices that share a model exchange is in `gather`.
"""
