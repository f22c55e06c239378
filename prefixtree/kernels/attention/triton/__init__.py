"""Tree attention in Triton, for fp16 and bf16 on NVIDIA GPUs from Ampere on.

`launch` is the host side, `forward` and `backward` hold the kernels, and `configs` the frozen table
of tiles. The folder imports triton, so it is imported only if it runs.
"""
