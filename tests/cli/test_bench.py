"""`prefixtree bench`: checks first, then times, of a file or of a tree that is made up."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from prefixtree import PrefixForest, TreeMask, tree_attention
from prefixtree.testing import attention as command
from tests.support.cli_runs import one_thread, run, run_json, write_rollouts

SMALL = ("--heads", 4, 2, "--head-dim", 16, "--device", "cpu", "--repeats", 2)
TREE = ("--levels", 3, "--branching", 3, "--node", 7)


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture
def rollout_file(tmp_path):
    return write_rollouts(tmp_path / "rollouts.jsonl")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tree_that_is_made_up(dtype):
    facts = run_json("bench", *TREE, *SMALL, "--dtype", dtype)
    assert facts["passed"] and facts["sequences"] == 9
    assert facts["tokens"] == {"replicated": 9 * 21, "distinct": 13 * 7, "ratio": 189 / 91}
    # a node at depth d of n tokens sees n d + n (n + 1) / 2 pairs
    packed = sum(count * (7 * depth + 28) for count, depth in ((1, 0), (3, 7), (9, 14)))
    assert facts["attention_flop_ratio"] == pytest.approx(9 * 21 * 22 / 2 / packed)
    sides = facts["packed"], facts["replicated"]
    assert [len(side["all_seconds"]) for side in sides] == [2, 2]
    assert facts["speedup"] == pytest.approx(sides[1]["seconds"] / sides[0]["seconds"])
    assert facts["efficiency"] == pytest.approx(facts["speedup"] / facts["attention_flop_ratio"])
    worst = max(check["difference"] for check in facts["checks"].values())
    assert list(facts["checks"]) == ["out", "dq", "dk", "dv"]
    # as exact as the dtype allows, far inside the limit
    assert worst < {"float32": 5e-6, "bfloat16": 1e-2}[dtype]


def test_help_teaches():
    printed = " ".join(run("bench", "--help").stdout.split())
    for words in ("prefixtree bench rollouts.jsonl.gz --per-turn", "red shows no times", "FA2"):
        assert words in printed
    assert "bench" in run("--help").stdout


def test_a_file(rollout_file):
    facts = run_json("bench", rollout_file, "--per-turn", *SMALL)
    assert facts["sequences"] == 8 and facts["tokens"]["replicated"] == 4 * (28 + 46)
    assert run_json("bench", rollout_file, "--tasks", 1, *SMALL)["sequences"] == 2
    assert run_json("bench", rollout_file, "--limit", 3, *SMALL)["sequences"] == 3
    printed = run("bench", rollout_file, *SMALL).stdout
    assert "torch SDPA, a sequence at a time" in printed and " ok" in printed
    assert re.search(r"│ ms +│ [\d.]+ ", printed) and re.search(r"│ tokens +│ 184 ", printed)


def test_red_shows_no_times_and_fails(monkeypatch):
    """A causal mask in place of the tree's: what packing without a mask would compute."""

    def causal(q, k, v, mask, **options):
        chain = TreeMask(np.full(mask.num_tokens, mask.num_tokens))
        return tree_attention(q, k, v, chain, **options)

    monkeypatch.setattr(command, "tree_attention", causal)
    facts = run_json("bench", *TREE, *SMALL, exit_code=1)
    assert not facts["passed"] and not facts["checks"]["out"]["passed"]
    for key in ("packed", "replicated", "speedup", "efficiency"):
        assert facts[key] is None
    result = run("bench", *TREE, *SMALL)
    assert result.exit_code == 1
    assert "differs, no times" in result.stdout and "ms" not in result.stdout


def test_nan_is_red(monkeypatch):
    monkeypatch.setattr(command, "tree_attention", lambda q, k, v, m, **_: q * float("nan"))
    monkeypatch.setattr(
        torch.autograd, "grad", lambda out, inputs, dout: [x.detach() * 0 for x in inputs]
    )
    facts = run_json("bench", *TREE, *SMALL, exit_code=1)
    assert facts["checks"]["out"] == {"difference": None, "limit": 1e-4, "passed": False}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--tasks", 1), "need a FILE"),
        (("--heads", 5, 2), "--heads 5 2: query heads must be a multiple"),
        (
            ("--levels", 30),
            "a tree of 384,307,168,202,282,325 nodes with 24,595,658,764,946,068,800",
        ),
        (("--heads", 0, 2), "--heads 0 2: query heads must be a multiple"),
        (("--device", "imaginary"), "--device imaginary"),
        (("--device", "meta"), "--device meta: it holds no numbers"),
        (("--head-dim", -4), "Invalid value for '--head-dim'"),
        (("--backend", "imaginary"), "backend 'imaginary' does not exist"),
        (("missing.jsonl",), "missing.jsonl: cannot be read"),
    ],
)
def test_what_cannot_run_says_so(arguments, message):
    result = run("bench", *arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_out_of_memory_names_a_way_out(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr(command, "tree_attention", full)
    result = run("bench", *TREE, *SMALL)
    assert result.exit_code == 2 and "smaller --limit or --node" in result.stderr


def test_pieces_hold_whole_sequences():
    assert command.pieces([3, 3, 3, 9, 1], 6) == [[0, 1], [2], [3], [4]]
    assert command.pieces([3, 3], 300) == [[0, 1]]


def test_several_pieces_add_up(monkeypatch):
    forest = command.synthetic(3, 3, 7)
    setting = command.Setting("cpu", "float32", 4, 2, 16)
    monkeypatch.setattr(command, "pieces", lambda lengths: [[0, 3], [1, 2, 4, 5], [6, 7, 8]])
    sides = command.Replication(forest, setting)
    assert len(sides.pieces) == 3
    assert max(sides.check().values()) < 5e-6
    packed, replicated = sides.times()
    assert packed["seconds"] > 0 and len(replicated["all_seconds"]) == 3


def test_a_synthetic_tree_is_full():
    forest = command.synthetic(4, 2, 5)
    assert (forest.num_nodes, forest.num_sequences, forest.num_levels) == (15, 8, 4)
    assert command.synthetic(1, 2, 5).num_sequences == 1


@pytest.mark.parametrize("keys", [None, [9, 4, 12]])
def test_replicated_attention_against_float64(keys):
    """Queries behind a prompt whose keys alone are given, too."""
    lengths = [5, 4, 12]
    generator = torch.Generator().manual_seed(1)
    counts = keys or lengths
    q, k, v = (
        torch.randn(sum(n), h, 8, generator=generator, dtype=torch.float64)
        for n, h in ((lengths, 4), (counts, 2), (counts, 2))
    )
    cpu = torch.device("cpu")
    _, attend = command.replicated_attention(lengths, cpu, torch.float64, keys)
    wanted = []
    for one, key, value in zip(q.split(lengths), k.split(counts), v.split(counts), strict=True):
        n, m = len(one), len(key)
        scores = torch.einsum("qhd,khd->hqk", one, key.repeat_interleave(2, 1)) / 8**0.5
        hidden = torch.arange(m)[None] > torch.arange(m - n, m)[:, None]
        p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        wanted.append(torch.einsum("hqk,khd->qhd", p, value.repeat_interleave(2, 1)))
    torch.testing.assert_close(attend(q, k, v), torch.cat(wanted), rtol=1e-9, atol=1e-9)


def test_fa2_of_flash_attn_before_torchs(monkeypatch):
    """On a GPU that is only a name: which function is called, and with which layout."""
    seen = []

    def varlen(*arguments, **options):
        seen.append((arguments, options))
        return arguments[0]

    to_tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda x, dtype, device: to_tensor(x, dtype=dtype))
    cuda, q = torch.device("cuda"), torch.zeros(5, 4, 8)
    installed = SimpleNamespace(flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "flash_attn", installed)
    name, attend = command.replicated_attention([2, 3], cuda, torch.bfloat16, [4, 3])
    attend(q, q, q)
    assert name == "FA2 of flash-attn" and seen[-1][1] == {"causal": True}
    assert [x.tolist() for x in seen[-1][0][3:5]] == [[0, 2, 5], [0, 4, 7]]
    assert seen[-1][0][5:] == (3, 4)
    # flash-attn-4 alone brings a package without it
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    import torch.nn.attention.varlen as theirs

    monkeypatch.setattr(theirs, "varlen_attn", varlen)
    name, attend = command.replicated_attention([2, 3], cuda, torch.bfloat16)
    attend(q, q, q)
    assert name == "FA2 of torch" and seen[-1][1] == {"window_size": (-1, 0)}
    assert seen[-1][0][5:] == (3, 3)


def test_auto_settings(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = command.Setting().resolved()
    assert (chosen.device, chosen.dtype, chosen.heads) == ("cuda", "bfloat16", 32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    chosen = command.Setting(head_dim=96).resolved()
    assert (chosen.device, chosen.dtype, chosen.heads, chosen.head_dim) == ("cpu", "float32", 8, 96)


def test_sequences_that_end_inside_the_tree():
    sequences = [[1, 2, 3, 4], [1, 2], [1, 2, 3, 4], [7]]
    forest = PrefixForest.from_sequences([np.array(s) for s in sequences])
    facts = command.bench(forest, command.Setting("cpu", "float32", 2, 1, 8, repeats=1))
    assert facts["passed"] and facts["tokens"]["distinct"] == 5
