"""Products with weights that are kept as codes.

`quantised` has the codes as files bring them, which `tiles` converts for Pallas-Triton. `fragments`
has them as a tensor core takes them, for the kernels of Mosaic GPU: `mosaic`, and `alone` for a
gate and an up of few rows, which `pairs` gates in registers.
"""
