"""AsyncGRPO's tree rows: its packer as an oracle for ours, and its keywords on our attention."""

from __future__ import annotations

import gc
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import prefixtree as pt
from prefixtree.errors import ForestError
from prefixtree.integrations.trl import tree_rows
from prefixtree.integrations.trl.tree_rows import tree_row_attention, tree_row_mask
from tests.integrations.trl.async_grpo import TreeRow

KEYS = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")


def branching(seed: int, count: int = 12) -> list[list[int]]:
    """Sequences that branch at every depth, repeat, end inside one another or share nothing."""
    draw = random.Random(seed)
    sequences: list[list[int]] = []
    for _ in range(count):
        stem = draw.choice(sequences) if sequences and draw.random() < 0.85 else []
        stem = stem[: draw.randint(0, len(stem))]
        sequences.append(stem + [draw.randrange(4) for _ in range(draw.randint(not stem, 9))])
    return [*sequences, sequences[0], sequences[1][:1]]


def trl_row(sequences: list[list[int]]) -> tuple[TreeRow, dict[str, Any]]:
    row = TreeRow()
    for i, ids in enumerate(sequences):
        row.add(
            {
                "input_ids": torch.tensor(ids),
                "completion_mask": torch.ones(len(ids), dtype=torch.long),
                "old_log_probs": torch.arange(len(ids), dtype=torch.float32),
                "advantage": float(i),
                "group_id": 0,
            }
        )
    return row, row.pack()


def row_keywords(packed: dict[str, Any]) -> dict[str, Any]:
    """As AsyncGRPOTrainer.compute_loss passes them."""
    longest_q, longest_k = packed["tree_max_seqlens"].tolist()
    return {
        **{key: packed[key] for key in KEYS},
        "tree_max_seqlen_q": longest_q,
        "tree_max_seqlen_k": longest_k,
    }


def paths_of(packed: dict[str, Any]) -> list[list[int]]:
    """The tokens that every packed token sees, read off TRL's tables alone."""
    rows, ends, index = (
        packed[k].tolist() for k in ("tree_cu_seqlens_q", "tree_cu_seqlens_k", "tree_kv_index")
    )
    seen = []
    for s in range(len(rows) - 1):
        path = index[ends[s] : ends[s + 1]]
        length = rows[s + 1] - rows[s]
        seen += [path[: len(path) - length + i + 1] for i in range(length)]
    return seen


# ---- TRL's packer as an oracle for ours ----------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_our_forest_is_trls_trie(seed: int) -> None:
    """TRL forks a token early: its tokens mapped to ours give ours, their positions, and exactly
    who sees whom."""
    sequences = branching(seed)
    packed = pt.pack(pt.PrefixForest.from_sequences(sequences))
    ours = packed.unpack(torch.arange(packed.num_tokens))
    row, theirs = trl_row(sequences)
    seen = paths_of(theirs)
    # sequence by sequence: the packed row of TRL that holds each token
    to_ours: dict[int, int] = {}
    ends = [row_end(theirs, seen, nodes, row) for nodes in row.sample_nodes]
    for ids, mine, path in zip(sequences, ours, ends, strict=True):
        assert theirs["input_ids"][path].tolist() == ids
        for r, p in zip(path, mine.tolist(), strict=True):
            assert to_ours.setdefault(r, p) == p
    assert sorted(to_ours) == list(range(len(theirs["input_ids"])))
    assert sorted(set(to_ours.values())) == list(range(packed.num_tokens))
    assert packed.num_tokens < sum(map(len, sequences))
    visible = packed.mask.dense().numpy()
    for r, keys in enumerate(seen):
        p = to_ours[r]
        assert int(packed.position_ids[p]) == int(theirs["position_ids"][r])
        assert int(packed.input_ids[p]) == int(theirs["input_ids"][r])
        # ancestors are distinct tokens of ours too
        assert [to_ours[k] for k in keys] == np.flatnonzero(visible[p]).tolist()


def row_end(
    packed: dict[str, Any], seen: list[list[int]], nodes: list[int], row: TreeRow
) -> list[int]:
    """The path of a sample in TRL's packed rows: of its last token, a leaf nobody shares unless the
    sample is there twice."""
    ids = [row.tokens[node] for node in nodes]
    leaves = packed["tree_cu_seqlens_q"][1:] - 1
    paths = [seen[leaf] for leaf in leaves.tolist()]
    matching = [p for p in paths if packed["input_ids"][p].tolist() == ids]
    # a path with the same tokens may go on below; the sample's own does not
    inner = {k for path in paths for k in path[:-1]}
    (path,) = (p for p in matching if p[-1] not in inner)
    return path


@pytest.mark.parametrize("seed", range(5))
def test_budgets_count_the_same_tokens(seed: int) -> None:
    """TRL's extra tokens are one a branch beyond the first, and one an end inside the tree."""
    sequences = branching(seed)
    forest = pt.PrefixForest.from_sequences(sequences)
    row, _ = trl_row(sequences)
    following: dict[tuple[int, ...], set[int | None]] = {}
    for ids in sequences:
        for n, after in enumerate([*ids[1:], None], start=1):
            following.setdefault(tuple(ids[:n]), set()).add(after)
    assert forest.num_tokens == len(following)
    assert len(row.tokens) == sum(map(len, following.values()))


# ---- keywords to masks ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_the_mask_sees_the_paths(seed: int) -> None:
    _, packed = trl_row(branching(seed))
    mask = tree_row_mask(*(packed[key] for key in KEYS))
    seen = [np.flatnonzero(row).tolist() for row in mask.dense().numpy()]
    assert seen == paths_of(packed)
    assert torch.equal(mask.position_ids.long(), packed["position_ids"])


def chain() -> dict[str, list[int]]:
    """0 1 | 2 | 3 4 with 2 and 3 4 below 0 1, and a tree of its own: 5."""
    return {
        "tree_kv_index": [0, 1, 0, 1, 2, 0, 1, 3, 4, 5],
        "tree_cu_seqlens_q": [0, 2, 3, 5, 6],
        "tree_cu_seqlens_k": [0, 2, 5, 9, 10],
    }


def test_the_chain_is_a_forest() -> None:
    mask = tree_row_mask(*(torch.tensor(v) for v in chain().values()))
    assert mask.subtree_end.tolist() == [5, 5, 3, 5, 5, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tree_cu_seqlens_q": [[0, 2, 3, 5, 6]]}, "expected tree_kv_index"),
        ({"tree_cu_seqlens_q": [0, 2, 3, 5]}, "expected tree_kv_index"),
        ({"tree_cu_seqlens_q": [0], "tree_cu_seqlens_k": [0]}, "expected tree_kv_index"),
        ({"tree_cu_seqlens_k": [0, 2, 5, 9, 9]}, "must begin at 0 and end with the 10"),
        ({"tree_cu_seqlens_k": [1, 2, 5, 9, 10]}, "must begin at 0"),
        ({"tree_cu_seqlens_q": [1, 2, 3, 5, 6]}, "must begin at 0"),
        ({"tree_cu_seqlens_q": [0, 2, 2, 5, 6]}, "segment 1 .* must have a token"),
        ({"tree_cu_seqlens_q": [0, 3, 4, 5, 6]}, "segment 0 .* a path that holds it"),
        # a path that is not the parent's: another token, another order, one left out
        ({"tree_kv_index": [0, 1, 0, 1, 2, 1, 1, 3, 4, 5]}, "segment 2 .* its parent's"),
        ({"tree_kv_index": [0, 1, 1, 0, 2, 0, 1, 3, 4, 5]}, "segment 1 .* a segment's last token"),
        ({"tree_kv_index": [0, 1, 0, 1, 2, 0, 1, 3, 3, 5]}, "segment 2 .* its parent's"),
        ({"tree_kv_index": [0, 1, 0, 1, 2, 0, 1, 4, 3, 5]}, "segment 2 .* its parent's"),
        ({"tree_kv_index": [0, 1, 0, 1, 2, 0, 2, 3, 4, 5]}, "segment 2 .* go on from the path"),
        ({"tree_kv_index": [0, 1, 0, 4, 2, 0, 1, 3, 4, 5]}, "segment 1 .* come before it"),
        ({"tree_kv_index": [0, 1, 0, -1, 2, 0, 1, 3, 4, 5]}, "segment 1 .* come before it"),
        ({"tree_kv_index": [0, 1, 0, 1, 2, 0, 1, 3, 4, 0]}, "segment 3 .* its parent's"),
        (
            # 4 hangs below 2 with 3 between them: breadth first
            {
                "tree_kv_index": [0, 1, 0, 1, 2, 0, 1, 3, 0, 1, 2, 4],
                "tree_cu_seqlens_q": [0, 2, 3, 4, 5],
                "tree_cu_seqlens_k": [0, 2, 5, 8, 12],
            },
            "segment 2 .* depth first",
        ),
    ],
)
def test_keywords_that_are_no_forest(changes: dict[str, Any], message: str) -> None:
    arrays = {**chain(), **changes}
    with pytest.raises(ForestError, match=message):
        tree_row_mask(*(torch.tensor(v) for v in arrays.values()))


# ---- attention -----------------------------------------------------------------------------------


def layer(**config: Any) -> nn.Module:
    """An attention module as transformers hands it over; not the first one, whose positions are
    compared as well."""
    module = nn.Module()
    module.config = SimpleNamespace(model_type="qwen3", attention_dropout=0.0, **config)
    module.layer_idx = 1
    return module


def dense(
    packed: dict[str, Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """softmax over the gathered path, query by query: [1, H, T, D] -> [1, T, H, D]."""
    rows, groups = [], q.shape[1] // k.shape[1]
    for r, path in enumerate(paths_of(packed)):
        keys = path[-window:] if window else path
        kk, vv = (x[0, :, keys].repeat_interleave(groups, 0) for x in (k, v))
        scores = (kk @ q[0, :, r, :, None])[..., 0] * scaling
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        rows.append((scores.softmax(-1)[..., None] * vv).sum(1))
    return torch.stack(rows)[None]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float64),
        ({"sliding_window": 4}, torch.float64),
        ({"softcap": 2.0}, torch.float64),
        ({"sliding_window": 3, "softcap": 1.5, "scaling": 0.7}, torch.float64),
        ({}, torch.float32),
    ],
    ids=["plain", "window", "softcap", "all", "float32"],
)
@pytest.mark.parametrize("seed", range(3))
def test_attention_and_gradients(options: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    _, packed = trl_row(branching(seed))
    draw = torch.Generator().manual_seed(seed)
    count = len(packed["input_ids"])
    shapes = [(1, heads, count, 8) for heads in (4, 2, 2)] + [(1, count, 4, 8)]
    *inputs, out_grad = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    options = {"scaling": 8**-0.5, **options}
    qkv = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    out, weights = tree_row_attention(layer(), *qkv, None, **row_keywords(packed), **options)
    assert weights is None and out.dtype == dtype
    out.backward(out_grad.to(dtype))
    exact = [x.clone().requires_grad_() for x in inputs]
    wanted = dense(
        packed, *exact, options["scaling"], options.get("sliding_window"), options.get("softcap")
    )
    wanted.backward(out_grad)
    tolerance = 1e-12 if dtype == torch.float64 else 5e-6
    assert torch.allclose(out.detach().double(), wanted.detach(), rtol=0, atol=tolerance)
    for mine, other in zip(qkv, exact, strict=True):
        assert torch.allclose(mine.grad.double(), other.grad, rtol=0, atol=10 * tolerance)


def test_no_key_or_value_is_copied_along_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention gets T rows of k and v, far fewer than the paths have entries."""
    stem = list(range(30))
    _, packed = trl_row([[*stem, i, i] for i in range(8)])
    rows = []
    attention = tree_rows.prefixtree_attention

    def spy(module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append((k.shape[2], v.shape[2], kwargs.keys() & set(row_keywords(packed))))
        return attention(module, q, k, v, *args, **kwargs)

    monkeypatch.setattr(tree_rows, "prefixtree_attention", spy)
    count = len(packed["input_ids"])
    x = torch.randn(1, 2, count, 8)
    tree_row_attention(layer(), x, x, x, None, **row_keywords(packed))
    assert rows == [(count, count, set())]
    assert count < len(packed["tree_kv_index"]) / 4


def test_lengths_that_are_too_small_are_refused() -> None:
    _, packed = trl_row(branching(0))
    x = torch.randn(1, 2, len(packed["input_ids"]), 8)
    keywords = row_keywords(packed)
    tree_row_attention(layer(), x, x, x, None, **keywords)
    for name in ("tree_max_seqlen_q", "tree_max_seqlen_k"):
        with pytest.raises(ForestError, match="the longest segment has"):
            tree_row_attention(layer(), x, x, x, None, **{**keywords, name: keywords[name] - 1})


def test_a_call_without_the_keywords_is_refused() -> None:
    x = torch.randn(1, 2, 5, 8)
    with pytest.raises(TypeError, match="tree_kv_index"):
        tree_row_attention(layer(), x, x, x, None)


# ---- once a batch --------------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever a mask is made."""
    count: list[int] = []
    make = tree_rows.tree_row_mask

    def counting(*args: Any) -> Any:
        count.append(1)
        return make(*args)

    monkeypatch.setattr(tree_rows, "tree_row_mask", counting)
    return count


def mask_of(tensors: list[torch.Tensor]) -> pt.TreeMask:
    return tree_rows._mask_of(*tensors).tree


def test_one_mask_a_batch(built: list[int]) -> None:
    tensors = [torch.tensor(v) for v in chain().values()]
    assert mask_of(tensors) is mask_of(tensors)
    assert len(built) == 1
    # equal tensors of another batch are another batch, and so is one that was written to
    other = [x.clone() for x in tensors]
    assert mask_of(other) is not mask_of(tensors) and len(built) == 2
    mask_of([tensors[0], *other[1:]])
    assert len(built) == 3
    tensors[0][:] = torch.tensor([0, 1, 0, 1, 2, 0, 1, 3, 4, 5])
    mask_of(tensors)
    assert len(built) == 4
    tensors[2] += 0
    mask_of(tensors)
    assert len(built) == 5


def test_a_changed_batch_is_read_again() -> None:
    tensors = [torch.tensor(v) for v in chain().values()]
    mask_of(tensors)
    tensors[0][9] = 2
    with pytest.raises(ForestError, match="segment 3"):
        mask_of(tensors)


def test_masks_go_with_their_batch(built: list[int]) -> None:
    """Nothing is kept for a batch that is gone, whatever gets its address next."""
    gc.collect()
    before = len(tree_rows._masks)
    for _ in range(20):
        mask_of([torch.tensor(v) for v in chain().values()])
    gc.collect()
    assert len(built) == 20 and len(tree_rows._masks) == before


def test_inference_tensors_are_read_every_time(built: list[int]) -> None:
    """They do not count writes."""
    with torch.inference_mode():
        tensors = [torch.tensor(v) for v in chain().values()]
        mask_of(tensors)
        mask_of(tensors)
    assert len(built) == 2
