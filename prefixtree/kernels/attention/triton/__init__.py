"""Tree attention in Triton, for fp16 and bf16 on NVIDIA GPUs from Ampere on.

`launch` is the host side; `forward` and `backward` hold the kernels, `primitives` what they share
and `configs` the frozen table of tiles. Imported only where it runs, since it imports triton.
"""
