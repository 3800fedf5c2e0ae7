"""How long steps and kernels take, beside what the device could do."""
