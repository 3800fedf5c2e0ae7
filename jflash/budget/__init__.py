"""How many rows of the blocks a step verifies: chosen between calls, by measured times."""
