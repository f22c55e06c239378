"""The flash backend: flash-attn-4's kernels, with block lists of the tiles to visit.

`lists` knows torch alone, `device` and `order` the CuTe DSL, `launch` what flash-attn-4 takes and
refuses.
"""
