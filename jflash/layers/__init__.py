"""The parts of a model: norms, attention, MLPs, experts, delta nets, and what they keep."""
