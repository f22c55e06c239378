"""The flash backend: flash-attn-4's kernels over block lists of the tiles to visit, or, where no
tree branches, over sequences of variable lengths.

`block_lists` knows torch alone, `mask_mods` and `backwards` the CuTe DSL, `launch` what
flash-attn-4 takes and refuses.
"""
