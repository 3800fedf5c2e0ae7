"""The thread that drives a device: what the next round is, and what the last one gave."""
