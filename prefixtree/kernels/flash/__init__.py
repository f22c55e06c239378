"""The flash backend: flash-attn-4's own kernels, told by block lists what a forest may skip.

`lists` knows torch alone, `device` and `order` the CuTe DSL, `launch` what flash-attn-4 takes and
refuses.
"""
