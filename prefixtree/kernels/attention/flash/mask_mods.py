"""Functions that run inside flash-attn-4's kernels: a partial tile's mask and the softcap.

flash-attn-4 calls a mask function element by element, so its loads and compares are its cost.
Arrays come as addresses among `aux_scalars`, not as `aux_tensors`. For those, flash-attn-4 wraps
every index into the sequence, two divisions per element, which the padding of our arrays makes
needless. SASS instructions that a masked step adds (sm_90, head dim 128, four query heads per kv
head; a forward step holds 64 scores per thread, a backward step 32):

                                            forward   backward
    k <= q < subtree_end[k], as a tensor        464        768  (spills)
    one compare of q - k, as a tensor           372        264  (spills)
    one compare of q - k, by its address        236        104

flash-attn-4 keys compiled kernels on the text of these functions, so they call no others of ours.
"""

import math
from functools import cache

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from flash_attn.cute import utils


def address(array: torch.Tensor) -> Int64:
    """Gives an int32 array's address, as mask functions take it; the caller keeps it alive."""
    return Int64(array.data_ptr())


@cute.jit
def visible(batch, head, q, k, seqlen_info, aux_tensors, aux_scalars):
    """Whether query q sees key k. aux_scalars: spans."""
    layout = cute.make_layout((1 << 30,))
    spans = cute.make_tensor(
        cute.make_ptr(Int32, aux_scalars[0], cute.AddressSpace.gmem, assumed_align=4), layout
    )
    # a key after the query wraps to a number that no span reaches
    seen = Uint32(q[0] - k[0]) < Uint32(spans[k[0]])
    return utils.scalar_to_ssa(seen, cutlass.Boolean)


@cute.jit
def visible_in_window(batch, head, q, k, seqlen_info, aux_tensors, aux_scalars):
    """Whether q sees k before reach (k + window). aux_scalars: spans, positions, reach."""
    layout = cute.make_layout((1 << 30,))
    spans = cute.make_tensor(
        cute.make_ptr(Int32, aux_scalars[0], cute.AddressSpace.gmem, assumed_align=4), layout
    )
    positions = cute.make_tensor(
        cute.make_ptr(Int32, aux_scalars[1], cute.AddressSpace.gmem, assumed_align=4), layout
    )
    reach = cute.make_tensor(
        cute.make_ptr(Int32, aux_scalars[2], cute.AddressSpace.gmem, assumed_align=4), layout
    )
    seen = (Uint32(q[0] - k[0]) < Uint32(spans[k[0]])) & (positions[q[0]] < reach[k[0]])
    return utils.scalar_to_ssa(seen, cutlass.Boolean)


@cute.jit
def visible_to_rows(batch, head, q, k, seqlen_info, aux_tensors, aux_scalars):
    """Whether the token of row q sees key k. aux_scalars: spans, tokens."""
    layout = cute.make_layout((1 << 30,))
    spans = cute.make_tensor(
        cute.make_ptr(Int32, aux_scalars[0], cute.AddressSpace.gmem, assumed_align=4), layout
    )
    tokens = cute.make_tensor(
        cute.make_ptr(Int32, aux_scalars[1], cute.AddressSpace.gmem, assumed_align=4), layout
    )
    seen = Uint32(tokens[q[0]] - k[0]) < Uint32(spans[k[0]])
    return utils.scalar_to_ssa(seen, cutlass.Boolean)


@cute.jit
def visible_in_window_to_rows(batch, head, q, k, seqlen_info, aux_tensors, aux_scalars):
    """Whether row q's token sees k. aux_scalars: spans, positions of rows, reach, tokens."""
    layout = cute.make_layout((1 << 30,))
    spans = cute.make_tensor(
        cute.make_ptr(Int32, aux_scalars[0], cute.AddressSpace.gmem, assumed_align=4), layout
    )
    positions = cute.make_tensor(
        cute.make_ptr(Int32, aux_scalars[1], cute.AddressSpace.gmem, assumed_align=4), layout
    )
    reach = cute.make_tensor(
        cute.make_ptr(Int32, aux_scalars[2], cute.AddressSpace.gmem, assumed_align=4), layout
    )
    tokens = cute.make_tensor(
        cute.make_ptr(Int32, aux_scalars[3], cute.AddressSpace.gmem, assumed_align=4), layout
    )
    seen = Uint32(tokens[q[0]] - k[0]) < Uint32(spans[k[0]])
    seen = seen & (positions[q[0]] < reach[k[0]])
    return utils.scalar_to_ssa(seen, cutlass.Boolean)


@cache
def softcap(cap: float):
    """Makes the score function c tanh(s / c) and its gradient, as a function of s."""
    # exp2 and a reciprocal are each good to the last bits of float32; flash-attn-4's own takes the
    # hardware's tanh, good to 2^-11, which at a score of 30 is 1.5 % of a probability
    # flash-attn-4 hands over no `aux_scalars` if there are none, as with variable lengths
    rate = 2.0 / (cap * math.log(2.0))

    @cute.jit
    def capped(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars=None):
        t = cute.make_rmem_tensor(score.shape, Float32)
        t.store(1.0 + cute.math.exp2(score * rate, fastmath=True))
        for i in cutlass.range_constexpr(cute.size(t.shape)):
            t[i] = cap - 2.0 * cap * cute.arch.rcp_approx(t[i])
        return t.load()

    @cute.jit
    def capped_gradient(
        grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars=None
    ):
        t = cute.make_rmem_tensor(score.shape, Float32)
        t.store(1.0 + cute.math.exp2(score * rate, fastmath=True))
        for i in cutlass.range_constexpr(cute.size(t.shape)):
            t[i] = 1.0 - 2.0 * cute.arch.rcp_approx(t[i])
        tanh = t.load()
        return grad * (1.0 - tanh * tanh)

    return capped, capped_gradient
