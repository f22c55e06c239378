"""The flash backend: flash-attn-4's kernels over block lists of the tiles to visit, or, where no
tree branches, over sequences of variable lengths.

`block_lists` and `chains` know torch alone, `mask_mods` and the backwards the CuTe DSL, `launch`
what flash-attn-4 takes and refuses.
"""
