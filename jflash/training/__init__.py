"""Training of small models from scratch, and the data made for it."""
