"""Products with weights that are kept as codes."""
