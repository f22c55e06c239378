"""Functions that run inside flash-attn-4's kernels: a partial tile's mask and the softcap.

flash-attn-4 calls a mask function element by element, so its loads and compares are its cost.
Arrays come as addresses among its `aux_scalars` and not as its `aux_tensors`: for those it wraps
every index into the sequence, two divisions per element, which the padding of our arrays makes
needless. SASS instructions that a masked step adds (sm_90, head dim 128, four query heads per kv
head; a forward step holds 64 scores per thread, a backward step 32):

                                            forward   backward
    k <= q < subtree_end[k], as a tensor        464        768  (spills)
    one compare of q - k, as a tensor           372        264  (spills)
    one compare of q - k, by its address        236        104

flash-attn-4 keys its compiled kernels on the text of these functions: they call no others of ours.
"""

import math
from functools import cache

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from flash_attn.cute import utils


def address(array: torch.Tensor) -> Int64:
    """An int32 array as the mask functions take it; the caller keeps it alive."""
    return Int64(array.data_ptr())


@cute.jit
def visible(batch, head, q, k, seqlen_info, aux_tensors, aux_scalars):
    """Query q sees key k. aux_scalars: spans."""
    layout = cute.make_layout((1 << 30,))
    spans = cute.make_tensor(
        cute.make_ptr(Int32, aux_scalars[0], cute.AddressSpace.gmem, assumed_align=4), layout
    )
    # a key behind the query wraps to a number no span reaches
    seen = Uint32(q[0] - k[0]) < Uint32(spans[k[0]])
    return utils.scalar_to_ssa(seen, cutlass.Boolean)


@cute.jit
def visible_in_window(batch, head, q, k, seqlen_info, aux_tensors, aux_scalars):
    """Query q sees key k and is less than the window below it. aux_scalars: spans, positions,
    reach, of which the window is a part: one kernel serves every window."""
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
    """`visible`, where q is a row and stands for a token. aux_scalars: spans, tokens."""
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
    """`visible_in_window`, where q is a row and stands for a token. aux_scalars: spans, positions
    of the rows, reach, tokens."""
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
    """The score function c tanh(s / c) and its gradient, of the score before it.

    By exp2 and a reciprocal, each good to the last bits of float32: flash-attn-4's own takes the
    hardware's tanh, good to 2^-11, which at a score of 30 is 1.5 % of a probability.

    flash-attn-4 hands over no `aux_scalars` where there are none, as with variable lengths.
    """
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
