"""The flash backend: flash-attn-4's kernels, over block lists of the tiles to visit.

If no tree branches, they run over sequences of variable lengths instead. `block_lists` imports
torch alone, `mask_mods` and `backwards` the CuTe DSL. `launch` knows what flash-attn-4 takes.
"""
