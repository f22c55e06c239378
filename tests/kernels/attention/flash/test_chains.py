"""Forests without branches run flash-attn-4's variable-length kernels, here an emulation of them
(flash_emulator.py) held to float64: the choice, the arguments, forward, backward and lse.

The kernels themselves are compiled in fa4/ and run in test_on_gpu.py.
"""

from __future__ import annotations

import gc
import weakref
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given

import prefixtree as pt
from prefixtree import PrefixForest, TreeMask, explain, tree_attention
from prefixtree.kernels.attention import choice
from prefixtree.kernels.attention.flash import block_lists, launch
from tests.support.attention_checks import Case, assert_as_promised, assert_numerics, ours, run
from tests.support.flash_emulator import Counts, Sequences, assert_exact
from tests.support.full import each_once, mostly
from tests.support.strategies import forests, mask_of

CPU = torch.device("cpu")
# shorter and longer than a tile, and one token alone
RAGGED = PrefixForest.from_parents([-1] * 5, [140, 1, 257, 30, 128], order="input")
OPTIONS = [{}, {"window": 60}, {"softcap": 3.0}, {"scale": 0.7}, {"window": 1, "softcap": 9.0}]
EXTRAS = [{}, {"sinks": True}, {"dlse": True}, {"sinks": True, "dlse": True}]


# ---- which forests are chains --------------------------------------------------------------------


@given(forests())
def test_chains_are_the_forests_in_which_no_token_has_two_children(forest: PrefixForest) -> None:
    host = mask_of(forest).host
    parents = host.predictor[host.predictor >= 0]
    branches = len(np.unique(parents)) < len(parents)
    assert (host.chain_starts is None) == branches
    if host.chain_starts is not None:
        roots = np.flatnonzero(host.predictor < 0)
        assert host.chain_starts.tolist() == [*roots.tolist(), host.num_tokens]
        assert host.chain_starts.dtype == np.int32


def test_sequences_that_end_within_a_chain_leave_it_a_chain() -> None:
    """A node for each part of it; and a branch at the last of all tokens is a branch."""
    nested = PrefixForest.from_sequences([[1, 2, 3, 4, 5], [1, 2], [7, 8]])
    assert nested.num_nodes == 3
    assert mask_of(nested).host.chain_starts.tolist() == [0, 5, 7]
    forked = PrefixForest.from_parents([-1, -1, 1, 1], [5, 4, 1, 1])
    assert mask_of(forked).host.chain_starts is None
    assert TreeMask(np.empty(0, np.int32)).host.chain_starts.tolist() == [0]


@pytest.mark.parametrize("count", mostly([256, 257, 600], [256, 257]))
def test_as_many_sequences_as_there_are(emulated: ModuleType, count: int) -> None:
    """flash-attn-4 looks more than 256 up in another way, and takes them alike."""
    mask = mask_of(PrefixForest.from_parents([-1] * count, [2] * count))
    assert_exact(mask, Case.random(mask, (2, 1), (8, 8), torch.float64))
    assert {type(x) for x in emulated.last.values()} == {Sequences}
    assert len(choice._tile_costs(mask.host, 0)[0]) == count


# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("extras", "options"), each_once(EXTRAS, OPTIONS))
def test_emulated_features(emulated: ModuleType, options: dict, extras: dict) -> None:
    mask = mask_of(RAGGED)
    emulated.last.clear()
    assert_exact(mask, Case.random(mask, (4, 2), (16, 8), torch.float64, **extras, **options))
    assert emulated.last == dict.fromkeys(("forward", "backward"), Sequences(5, 257))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 4), (6, 2)])
def test_emulated_heads(emulated: ModuleType, heads: tuple[int, int]) -> None:
    mask = mask_of(RAGGED)
    assert_exact(mask, Case.random(mask, heads, (8, 8), torch.float64))


@pytest.mark.parametrize("window", [None, 60])
def test_a_branch_takes_the_block_lists(emulated: ModuleType, window: int | None) -> None:
    """The same lengths, and one node more in one of the trees."""
    parents, lengths = [-1] * 5, [140, 1, 257, 30, 128]
    for more, kind in (([], Sequences), ([2, 2], Counts)):
        mask = mask_of(PrefixForest.from_parents(parents + more, lengths + [3] * len(more)))
        options = {} if window is None else {"window": window}
        assert_exact(mask, Case.random(mask, (2, 1), (8, 8), torch.float64, **options))
        assert {type(x) for x in emulated.last.values()} == {kind}


def test_the_returned_lse_is_over_the_keys(emulated: ModuleType) -> None:
    """With a sink too, which flash-attn-4's own lse counts."""
    mask = mask_of(RAGGED)
    case = Case.random(mask, (2, 1), (8, 8), torch.float64, sinks=True)
    lses = [
        tree_attention(
            case.q, case.k, case.v, mask, sinks=case.sinks, backend=backend, return_lse=True
        )[1]
        for backend in ("flash", "reference")
    ]
    assert lses[0].shape == (2, mask.num_tokens)
    torch.testing.assert_close(lses[0].double(), lses[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("extras", [{}, {"sinks": True, "dlse": True}])
def test_numerics_and_layout_in_half_precision(emulated: ModuleType, extras: dict) -> None:
    mask = mask_of(RAGGED)
    case = Case.random(mask, (2, 1), (64, 64), torch.bfloat16, **extras)
    assert_numerics(RAGGED, mask, case, ours(mask, backend="flash"))
    assert_as_promised(case, mask, backend="flash")


def test_expanded_gradients_are_copied(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel compiled for a gradient of strides 0, as a sum has, is used for any other."""
    seen: list[tuple[int, ...]] = []
    call = emulated.flash_attn_bwd

    def spy(*tensors: torch.Tensor, **how: object) -> object:
        seen.extend(x.stride() for x in tensors)
        return call(*tensors, **how)

    interface = emulated.sys.modules["flash_attn.cute.interface"]
    monkeypatch.setattr(interface, "_flash_attn_bwd", spy)
    mask = mask_of(RAGGED)
    q = torch.randn(mask.num_tokens, 2, 8, requires_grad=True)
    k = torch.randn(mask.num_tokens, 2, 8)
    tree_attention(q, k, k, mask, backend="flash").sum().backward()
    assert len(seen) == 6 and not any(0 in strides for strides in seen), seen


def test_the_sequences_are_made_once_and_go_with_the_mask(emulated: ModuleType) -> None:
    mask = mask_of(RAGGED)
    made = block_lists.chains_of(mask.host, CPU)
    assert made is not None and made.starts.tolist() == [0, 140, 141, 398, 428, 556]
    run(Case.random(mask, (1, 1), (8, 8), torch.float64), ours(mask, backend="flash"))
    assert block_lists.chains_of(mask.to("cpu").host, CPU) is made
    host = weakref.ref(mask.host)
    assert host() in block_lists._chains
    del mask
    gc.collect()
    assert host() is None


def test_the_emulation_sees_wrong_sequences(emulated: ModuleType) -> None:
    mask = mask_of(RAGGED)
    made = block_lists.chains_of(mask.host, CPU)
    assert made is not None
    # the border of the first two, moved by a token
    made.starts[1] += 1
    with pytest.raises(AssertionError):
        assert_exact(mask, Case.random(mask, (1, 1), (8, 8), torch.float64))


# ---- the choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 100, 128, 129, 300, 700])
def test_the_work_is_of_tiles_that_begin_with_each_sequence(window: int) -> None:
    """Those of block tables, if every sequence were as long as its tiles."""
    lengths = [140, 1, 257, 30, 128, 1000]
    host = mask_of(PrefixForest.from_parents([-1] * 6, lengths, order="input")).host
    filled = [-(-n // 128) * 128 for n in lengths]
    padded = mask_of(PrefixForest.from_parents([-1] * 6, filled, order="input"))
    tables = padded.tables(pt.TileShape(128, 128), window or None)
    tiles = int(tables.q_cost.sum()) / 2 + 2.7 * len(tables.q_cost)
    want = tiles * 128 * 128 / host.visible_pairs(window)
    assert choice.flash_work(host, window) == pytest.approx(want)
    share = float(tables.k_cost.max() / tables.k_cost.sum())
    assert choice.longest_key_tile_share(host, window) == pytest.approx(share)


def test_explain_names_the_kernels_of_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "refusal", lambda call: None)
    said = []
    for more in ([], [0, 0]):
        mask = mask_of(PrefixForest.from_parents([-1] * 4 + more, [4000] * (4 + len(more))))
        row = torch.zeros(1, 1, 128, dtype=torch.bfloat16).as_subclass(OnGpu)
        said.append(
            explain(
                mask,
                row.expand(mask.num_tokens, 8, 128),
                *[row.expand(mask.num_tokens, 2, 128)] * 2,
            )
        )
    assert "would run 'flash'" in said[0] and "would run 'flash'" in said[1]
    assert "by its variable-length kernels (no tree branches)" in said[0]
    assert "variable-length" not in said[1]


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU: what the choice looks at."""

    is_cuda = True
