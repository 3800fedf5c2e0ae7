"""How long steps, kernels, requests and loading take, beside what the device could do.

`steps`, `kernels` and `serving` time, at the sizes of `shapes`; `floors` has the least that a step
must read and compute, and `kernel_trace` the kernels of a call.
"""
