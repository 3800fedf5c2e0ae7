"""A pair on its devices: their kernels, their parts of it, and where they meet."""
