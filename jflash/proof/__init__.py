"""Losslessness on a device, and what the compiler made of a step."""
