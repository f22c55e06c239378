"""Every case from beginning to end, on the CPU and tiny."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cases import (
    depth,
    distill,
    head,
    layer,
    memory,
    model,
    parallel,
    peers,
    pictures,
    planning,
    sparse,
)
from benchmarks.lib import (
    kinds,
    layers,
    policy,
    timing,
)
from benchmarks.lib.kinds import KINDS
from benchmarks.lib.workloads import code_agents
from prefixtree import compile_layers, plan_micro_batches, tree_attention
from prefixtree.kernels import indexer_kernels
from prefixtree.kernels.latents import gathered
from prefixtree.planning.model_cost import model_cost
from tests.benchmarks.support import TINY, agent_rollouts, case_named
from tests.support.benchmark_runs import result
from tests.support.full import mostly
from tests.support.hooks import lose_images
from tests.support.spawn import run_ranks


@pytest.mark.full
def test_depth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, image = tmp_path / "depth.json", tmp_path / "depth.png"
    some = ["--depths", "1", "5", "--nodes", "512", "--scale", "0.01"]
    assert depth.main([*TINY, *some, "--out", str(out), "--plot", str(image)]) == 0
    data = result(out)
    rows = {row["case"]: row for row in data["rows"]}
    assert len(rows) == 2 + 3 and data["environment"]["skipped"] == ["fa4"]
    flat, deep = rows["depth 1"], rows["depth 5"]
    assert flat["bound"] == 1 and flat["distinct"] == flat["replicated"] == 128 * 41
    assert deep["sequences"] == 128 and deep["nodes"] == 1 + 4 + 8 + 64 + 128
    for row in rows.values():
        assert row["red"] == [] and set(row["times"]) == {"packed", "fa2", "own"}
        for side in ("fa2", "own"):
            speed_up = row["times"][side]["ms"] / row["times"]["packed"]["ms"]
            assert row["speedup"][side] == pytest.approx(speed_up)
            assert row["efficiency"][side] == pytest.approx(speed_up / row["bound"])
    assert image.stat().st_size > 20_000
    # what an earlier run wrote is drawn again, and not run again
    again = tmp_path / "again.png"
    assert depth.main(["--read", str(out), "--plot", str(again)]) == 0
    assert again.stat().st_size > 20_000
    assert "5 green, 0 out of memory, 0 red" in capsys.readouterr().out


@pytest.mark.full
def test_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, image = tmp_path / "peers.json", tmp_path / "peers.png"
    some = ["--workloads", "4K then 4-2-2-1 x 1K", "documents 32 x 4K", "--scale", "0.01"]
    assert peers.main([*TINY, *some, "--out", str(out), "--plot", str(image)]) == 0
    data = result(out)
    tree, apart, dense, matrices = data["rows"]
    assert data["environment"]["skipped"] == ["fa4", "flex"]
    assert tree["replicated"] == 16 * 80 and tree["bound"] > 1.5 and apart["bound"] == 1
    for row in (tree, apart):
        assert set(row["times"]) == {"packed", "fa2", "own"} and set(row["speedup"]) == {
            "fa2",
            "own",
        }
    pairs = 4 * 82 * 83 / 2
    assert dense["case"] == "dense causal, 4 x 82" and dense["side"] == "own"
    useful = 4 * 32 * 4 * pairs
    assert dense["forward_tflops"] == pytest.approx(useful / dense["forward_ms"] / 1e9)
    assert dense["backward_tflops"] == pytest.approx(2.5 * useful / dense["backward_ms"] / 1e9)
    assert matrices["forward_tflops"] > 0 and image.stat().st_size > 10_000
    assert peers.main(["--read", str(out)]) == 0
    assert "4 green, 0 out of memory, 0 red" in capsys.readouterr().out


@pytest.mark.full
def test_parallel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "steps.json"
    some = ["--dtype", "float32", "--workloads", "prompt 24K x 128 x 8K", "--scale", "0.002"]
    assert parallel.main([*TINY, *some, "--backend", "sdpa", "--out", str(out)]) == 0
    whole, cut, steps, kept, trunks, auto = result(out)["rows"]
    assert [row["side"] for row in (whole, cut, steps)] == ["whole", "cut", "steps"]
    assert whole["computed"] == steps["computed"] == whole["tokens"] == 49 + 128 * 16
    assert trunks["computed"] == whole["tokens"] and " trunks of 49 tokens" in trunks["trunks"]
    assert auto["computed"] == whole["tokens"]
    assert 0 < steps["predicted_peak_bytes"] < kept["predicted_peak_bytes"]
    # cut trees repeat the prompt, and steps import it
    assert cut["computed"] > whole["tokens"]
    for row in (cut, steps, kept, trunks, auto):
        assert row["red"] == [] and 0 < row["errors"]["gradient"] < 1e-5
        assert row["of_whole"] == pytest.approx(whole["seconds"] / row["seconds"])
    with pytest.raises(SystemExit):
        parallel.main([*TINY, *some, "--sides", "parts"])
    assert parallel.main(["--read", str(out)]) == 0
    assert "6 green, 0 out of memory, 0 red" in capsys.readouterr().out


def test_the_code_agents_are_as_stated() -> None:
    forest = code_agents()
    children = np.bincount(forest.node_parent[forest.node_parent >= 0])
    assert forest.num_sequences == 233 and forest.num_nodes == 285 and forest.num_levels == 58
    assert (children > 1).sum() == 101 and int(forest.sequence_lengths.max()) == 13_724
    assert (forest.num_tokens, forest.num_replicated_tokens) == (146_684, 1_322_051)
    lengths = forest.node_length
    assert (lengths.min(), lengths.max(), np.median(lengths)) == (3, 7321, 427)
    # the tokens that a rank computes
    for budget in (8192, 16384, 32768):
        stats = plan_micro_batches(forest, budget, trunks=True).stats
        assert stats.packed_tokens == forest.num_tokens and stats.trunks.peak <= budget
    assert plan_micro_batches(forest, 32768).stats.packed_tokens > 1.14 * forest.num_tokens


def test_a_layer_of_parallel_is_the_difference_of_two_runs() -> None:
    def run(layers: int, whole: float, parts: float, commit: str = "a") -> dict[str, Any]:
        rows = [
            {"workload": "chain 128K", "side": side, "seconds": seconds}
            for side, seconds in (("whole", whole), ("parts", parts))
        ]
        about = {"shape": "qwen3-8b", "ranks": 2, "fsdp": False, "layers": layers, "rows": rows}
        return about | {"environment": {"commit": commit}}

    # 0.1 s a call, and 0.5 s a layer, or 0.26 on two GPUs
    _, table = parallel.per_layer([run(4, 2.1, 1.14), run(12, 6.1, 3.22)])
    cells = [[column.cell(line) for column in table.columns] for line in table.lines]
    assert [line[3:] for line in cells] == [
        ["whole", "4 and 12", "500.0", ""],
        ["parts", "4 and 12", "260.0", f"{0.5 / 0.52:.3f}"],
    ]
    assert not list(parallel.per_layer([run(4, 2.1, 1.14)]))
    # another commit may differ in what a call does once
    assert not list(parallel.per_layer([run(4, 2.1, 1.14), run(12, 6.1, 3.22, "b")]))


@pytest.mark.full
def test_parallel_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "parallel.json"
    some = ["--dtype", "float32", "--workloads", "chain 128K", "--scale", "0.002", "--fsdp"]
    arguments = [*TINY, *some, "--out", str(out)]
    ranks = "tests.benchmarks.case_ranks"
    assert run_ranks(ranks, tmp_path, arguments=["parallel", arguments, True]) == [0, 0]
    whole, parts, steps, heads, gather = result(out)["rows"]
    assert parts["ranks"] == 2 and parts["most_received_rows"] > 0
    for row in (parts, steps, heads, gather):
        assert row["red"] == [] and 0 < row["errors"]["gradient"] < 1e-5
        expected = whole["seconds"] / 2 / row["seconds"]
        assert row["efficiency"] == pytest.approx(expected)
        assert row["imbalance"] >= 1
        assert row["exposed_seconds"] == row["seconds"] - row["alone_seconds"]
    # two layers of 2 heads of 16 numbers, of keys and of values: twice forward, once backward
    of_layer = 3 * 2 * 2 * 2 * 16 * 4
    tokens, scores = whole["tokens"], 2 * 4 * whole["tokens"]
    assert 0 < gather["received_bytes"] - tokens / 2 * of_layer < tokens / 16 * of_layer + scores
    most = parts["most_received_rows"] * of_layer
    assert most / 3 < parts["received_bytes"] <= most + scores
    image = tmp_path / "efficiency.png"
    read = ["--read", str(out), "--beside", str(out), "--plot", str(image)]
    assert parallel.main(read) == 0 and image.stat().st_size > 10_000


@pytest.mark.parametrize("script", ["peers", "depth", "layer", "model", "memory"])
def test_a_side_that_does_not_exist_is_refused(script: str) -> None:
    """Not run as another under its name."""
    with pytest.raises(SystemExit):
        case_named(script).main([*TINY, "--sides", "fa3"])


def test_dense_attention_is_the_same_by_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's kernels by the one that a CPU has; and one that is not causal is red."""
    everything = dict.fromkeys(peers.SDPA, peers.SDPBackend.MATH)
    monkeypatch.setattr(peers, "SDPA", everything)
    options = SimpleNamespace(
        device="cpu",
        dtype="float32",
        heads=(4, 2),
        head_dim=32,
        scale=0.005,
        backend="auto",
        repeats=1,
    )
    known: dict[str, Any] = {}
    assert peers.ceiling("own", known, options)["red"] == []
    found = peers.ceiling("cudnn", known, options)
    assert found["red"] == [] and set(found["check"]) == {"out", "dq", "dk", "dv"}
    right = peers.dense
    monkeypatch.setattr(
        peers, "dense", lambda side, count, *rest: right(side, count // 2, 82, options)
    )
    found = peers.ceiling("fa2", known, options)
    assert "out" in found["red"] and "forward_ms" not in found


def test_layer(tmp_path: Path) -> None:
    out, image = tmp_path / "layer.json", tmp_path / "layer.png"
    some = ["--prompts", "5120", "--micro-batches", "1", "3"]
    assert layer.main([*TINY, *some, "--out", str(out), "--plot", str(image)]) == 0
    data = result(out)
    # prefix-grouper is no dependency: with it the side runs, without it it is skipped by name
    skipped = data["environment"]["skipped"]
    assert ("grouper" in skipped) == (data["environment"]["prefix-grouper"] is None)
    rows = {(row["micro_batch"], row["side"]): row for row in data["rows"]}
    assert all(row["ms"] > 0 and row["red"] == [] for row in rows.values())
    packed, own = rows[3, "packed"], rows[3, "own"]
    assert own["tokens"] > packed["tokens"]
    assert packed["flop_ratio"] == pytest.approx(own["flops"] / packed["flops"])
    bound = own["ms"] / packed["flop_ratio"]
    assert packed["of_bound"] == pytest.approx(bound / packed["ms"])
    assert rows[1, "packed"]["flop_ratio"] == pytest.approx(1)
    assert image.stat().st_size > 10_000


@pytest.mark.full
def test_model(tmp_path: Path) -> None:
    rollouts = agent_rollouts(tmp_path)
    out, top = tmp_path / "model.json", tmp_path / "profile.txt"
    image = tmp_path / "model.png"
    where = ["--out", str(out), "--profile", str(top), "--plot", str(image)]
    some = ["--layers", "1", "--micro-batches", "32", "--rollouts", str(rollouts)]
    assert model.main([*TINY, *some, *where]) == 0
    found = {(row["case"][:7], row["side"]): row for row in result(out)["rows"]}
    assert len(found) == 3 * 3
    alone = found["nothing", "packed"]
    assert alone["flop_ratio"] == 1 and alone["computed"] == alone["replicated"]
    for (case, side), row in found.items():
        packed = found[case, "packed"]
        assert row["replicated"] == packed["replicated"] >= packed["computed"]
        assert row["tokens_per_s"] == pytest.approx(row["replicated"] / row["seconds"])
        assert row["mfu"] == pytest.approx(packed["mfu"] * packed["seconds"] / row["seconds"])
        assert case == "nothing" or (side == "packed") == (row["own_mfu"] == row["mfu"])
    packed, own = found["8K, 32 ", "packed"], found["8K, 32 ", "own"]
    assert packed["flop_ratio"] > 2
    bound = own["seconds"] / packed["flop_ratio"]
    assert packed["of_bound"] == pytest.approx(bound / packed["seconds"])
    assert "drift" in packed and packed["drift"] < 0.02
    assert top.read_text().count("== ") == 3 * 2 and "Self CPU" in top.read_text()
    assert image.stat().st_size > 10_000


EXPERTS = ["--shape", "qwen3-30b-a3b", "--cases", "apart", "--layers", "1"]


# dynamo's own look at .grad of its inputs, and at a cached function of transformers' experts
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_model_of_compiled_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Dynamo, whose graphs nothing need turn into code."""
    monkeypatch.setattr(layers, "compile_layers", partial(compile_layers, backend="eager"))
    out = tmp_path / "model.json"
    some = [*EXPERTS, "--sides", "packed", "fa2", "fa4", "--profile", str(tmp_path / "top.txt")]
    best = ["--layers-by", "compile", "--recompute", "auto"]
    assert model.main([*TINY, *some, *best, "--out", str(out)]) == 0
    data = result(out)
    assert data["layers_by"] == "compile" and set(data["checks"]) == {"packed", "fa2"}
    assert data["environment"]["skipped"] == ["fa4"]
    packed, fa2 = data["rows"]
    assert packed["red"] == fa2["red"] == [] and fa2["drift"] < 0.05
    # in the place of ours, not beside it
    assert packed["backends"] == ["sdpa"] and fa2["backends"] == []
    assert packed["modes"] == {"all": 0, "all_but_attention": 0, "nothing": 1}
    # of the modules in compiled layers nothing is known
    kinds_ms = packed["kinds_ms"]
    assert "grouped products" in kinds_ms and "experts, elementwise" not in kinds_ms
    with pytest.raises(SystemExit):
        model.main([*TINY, *EXPERTS, "--layers-by", "liger"])
    # beside a run with defaults
    default = data | {"layers_by": "transformers"}
    _, table = model.best(default, data)
    assert [line[1] for line in table.lines] == ["packed", "fa2"]
    gain = f"{fa2['seconds'] / packed['seconds']:.2f}x"
    assert [column.cell(table.lines[1]) for column in table.columns[-2:]] == [gain, gain]


@pytest.mark.full
def test_model_with_experts(tmp_path: Path) -> None:
    out, top = tmp_path / "experts.json", tmp_path / "profile.txt"
    assert model.main([*TINY, *EXPERTS, "--out", str(out), "--profile", str(top)]) == 0
    data = result(out)
    rows = {row["side"]: row for row in data["rows"]}
    assert set(rows) == set(data["checks"]) == {"packed", "fa2", "own"}
    assert data["environment"]["skipped"] == ["fa4", "fla"] and rows["packed"]["flop_ratio"] == 1
    for side in ("packed", "fa2"):
        # every kind has a share, in eager layers
        assert set(rows[side]["kinds_ms"]) == set(KINDS) and rows[side]["drift"] < 0.05
    *_, shares = model.experts(data)
    assert [line for line, *_ in shares.lines] == ["fa2", "packed"]


def test_the_shape_with_experts_is_that_of_the_model() -> None:
    """Qwen3-30B-A3B: 30.5e9 parameters, of which a token meets 3.0e9 outside embedding and head."""
    shape = layers.config(48, False, shape="qwen3-30b-a3b")
    assert shape._experts_implementation == "grouped_mm"
    cost = model_cost(shape)
    assert cost.parameters == 30_532_122_624
    router, experts = 2048 * 128, 8 * 3 * 2048 * 768
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128
    assert cost.token_weights == 48 * (router + experts + attention)


def test_times_by_kind_are_all_of_the_time() -> None:
    """Also those of a backward that recomputes, whose operators stand in no module's forward."""
    shape = layers.config(1, True, shape="qwen3-30b-a3b")
    some = layers.checkpointed(layers.model_of(shape, "cpu", "float32", attention="eager"))

    def run() -> None:
        some(input_ids=torch.arange(40)[None], use_cache=False).logits.sum().backward()

    run()
    hooks = sum(len(module._forward_hooks) for module in some.modules())
    with kinds.marked(some):
        seen = timing.profile_of(run)
    assert sum(len(module._forward_hooks) for module in some.modules()) == hooks
    found = kinds.ms_by_kind(seen)
    whole = sum(e.self_cpu_time_total for e in seen.events() if e.device_type.name == "CPU")
    assert sum(found.values()) == pytest.approx(whole / 1e3)
    nodes = [e for e in seen.events() if e.name.startswith("autograd::engine::evaluate_function")]
    of_norms = [e for e in nodes if "Rsqrt" in e.name or "MeanBackward" in e.name]
    known = kinds.scopes_of(seen.events())
    assert {known.get((e.fwd_thread, e.sequence_nr)) for e in of_norms} == {"norms"}


def test_a_side_that_runs_another_sides_attention_is_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As layers would that were compiled with the attention of the side before."""
    monkeypatch.setattr(policy, "attention_in", lambda side, forest, options, by: (None, "sdpa"))
    out = tmp_path / "model.json"
    some = ["--layers", "1", "--cases", "apart", "--sides", "fa2", "--out", str(out)]
    assert model.main([*TINY, *some]) == 1
    (row,) = result(out)["rows"]
    assert row["red"] == ["our operator ran ['sdpa'], and not []"] and "seconds" not in row


@pytest.mark.full
def test_memory(tmp_path: Path) -> None:
    out, image = tmp_path / "memory.json", tmp_path / "memory.png"
    some = ["--layers", "2", "--prompts", "2048", "4096", "--counts", "4", "8"]
    assert memory.main([*TINY, *some, "--out", str(out), "--plot", str(image)]) == 0
    data = result(out)
    assert len(data["rows"]) == 8 and set(data["fits"]) == {"packed", "fa2"}
    tokens = {(r["prompt"], r["count"], r["side"]): r["tokens"] for r in data["rows"]}
    assert tokens[41, 8, "packed"] == 41 + 8 * 10 and tokens[41, 8, "fa2"] == 8 * 51
    assert image.stat().st_size > 10_000


@pytest.mark.full
def test_head(tmp_path: Path) -> None:
    out = tmp_path / "head.json"
    some = ["--dtype", "float16", "--heads", "Gemma-2-9B, softcap 30"]
    assert head.main([*TINY, *some, "--out", str(out)]) == 0
    rows = result(out)["rows"]
    assert [row["side"] for row in rows] == ["triton", "torch", "eager"]
    assert all(row["ms"] > row["forward_ms"] > 0 and row["red"] == [] for row in rows)


@pytest.mark.parametrize("is_right", mostly([True, False], [False]))
def test_sparse(
    is_right: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Red where the choice is ignored."""
    if not is_right:
        ignoring = lambda *a, chosen, **options: tree_attention(*a, **options)  # noqa: E731
        monkeypatch.setattr(sparse, "tree_attention", ignoring)
    out = tmp_path / "sparse.json"
    some = ["--dtype", "float16", "--heads", "1", "--topk", "700", "--backend", "sdpa"]
    some += ["--replicated", "2000"]
    assert sparse.main([*TINY, *some, "--out", str(out)]) == (not is_right)
    dense, *chosen = result(out)["rows"]
    sides = [sparse.ALL, sparse.CHOSEN, sparse.CHOSEN + sparse.REPLICATED]
    assert [row["side"] for row in (dense, *chosen)] == sides
    assert dense["red"] == [] and dense["forward_ms"] > 0 and dense["backward_ms"] > 0
    for row in chosen:
        assert bool(row["red"]) == (not is_right) == ("forward_ms" not in row)
    if is_right:
        assert chosen[-1]["micro_batches"] > 1 and chosen[-1]["tokens"] > result(out)["tokens"]
    capsys.readouterr()
    assert sparse.main(["--read", str(out)]) == (not is_right)
    assert ("replicated batch" in capsys.readouterr().out) == is_right


@pytest.mark.full
@pytest.mark.parametrize("is_right", [True, False])
def test_sparse_selection(is_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red where scores are those of other heads; in triton's interpreter."""
    if not is_right:
        inner = indexer_kernels.index_scores
        turned = lambda q, *rest: inner(q.flip(1), *rest)  # noqa: E731
        monkeypatch.setattr(indexer_kernels, "index_scores", turned)
    monkeypatch.setattr(sparse, "run_side", lambda *_: {"forward_ms": 1.0, "backward_ms": 2.0})
    # the interpreter takes minutes for 64 heads of 128
    monkeypatch.setattr(sparse, "INDEXER", (8, 32))
    out = tmp_path / "sparse.json"
    some = ["--dtype", "float16", "--topk", "700", "--backend", "triton"]
    assert sparse.main([*TINY, *some, "--out", str(out)]) == (not is_right)
    for row in result(out)["rows"][2:]:
        assert bool(row["red"]) == (not is_right) == ("forward_ms" not in row)


@pytest.mark.parametrize("is_right", [True, False])
def test_sparse_chains(
    is_right: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Red where a projection of gathered latents has no gradient."""
    if not is_right:
        inner = gathered.gathered_attention
        halved = lambda q, x, w, *rest: inner(q, x, (w + w.detach()) / 2, *rest)  # noqa: E731
        monkeypatch.setattr(gathered, "gathered_attention", halved)
    out = tmp_path / "chains.json"
    some = ["--dtype", "float32", "--backend", "sdpa", "--chains", "8192"]
    assert sparse.main([*TINY, *some, "--out", str(out)]) == (not is_right)
    tiles, found = result(out)["rows"]
    assert tiles["red"] == [] and tiles["backward_ms"] > 0
    assert found["red"] == ([] if is_right else ["dw"])
    assert ("forward_ms" in found) == is_right
    capsys.readouterr()
    assert sparse.main(["--read", str(out)]) == (not is_right)
    assert ("as fast" in capsys.readouterr().out) == is_right


@pytest.mark.full
# dynamo's own look at .grad of its inputs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_distill(tmp_path: Path) -> None:
    out = tmp_path / "distill.json"
    assert distill.main([*TINY, "--out", str(out)]) == 0
    data = result(out)
    # in their environments
    skipped = data["environment"]["skipped"]
    assert set(skipped) <= {"trl", "liger_chunks"}
    assert [row["side"] for row in data["rows"]] == [s for s in distill.SIDES if s not in skipped]
    assert all(row["ms"] > 0 and row["red"] == [] for row in data["rows"])


@pytest.mark.full
# dynamo's own look at .grad of its inputs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "images.json"
    monkeypatch.setattr(pictures, "compile_layers", partial(compile_layers, backend="eager"))
    # those left out differ from two of these in one way each
    sides = [s for s in pictures.SIDES if s not in ("auto-40", "compiled", "compiled-auto")]
    assert pictures.main([*TINY, "--sides", *sides, "--out", str(out)]) == 0
    found = result(out)
    assert (found["screenshots"], found["distinct_screenshots"]) == (24, 10)
    assert [row["side"] for row in found["rows"]] == sides
    assert all(row["ms"] > 0 and row["red"] == [] for row in found["rows"])
    assert all(row["checked tower"] < 1e-5 for row in found["rows"])


def test_images_without_their_gradients_are_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_images(monkeypatch)
    out = tmp_path / "images.json"
    assert pictures.main([*TINY, "--sides", "checkpointing", "--out", str(out)]) == 1
    (row,) = result(out)["rows"]
    assert "ms" not in row
    assert [text.split()[0] for text in row["red"]] == ["tower"]


def test_images_of_real_sizes() -> None:
    """As many tokens and screenshots as the benchmark says, here of one token each."""
    config = pictures.config_of(True)
    batch = pictures.Batch.of(replace(pictures.Sizes(), grid=(2, 2)), config, "cpu")
    found = batch.facts()
    # of 44 x 80 patches
    more = 44 * 80 // 4 - 1
    assert found["tokens"] + 432 * more == 526_944
    assert found["distinct_tokens"] + 78 * more == 83_667
    assert (found["samples"], found["screenshots"], found["distinct_screenshots"]) == (96, 432, 78)


@pytest.mark.full
def test_planning(tmp_path: Path) -> None:
    out, image = tmp_path / "planning.json", tmp_path / "planning.png"
    arguments = ["--sizes", "3000", "--repeats", "1", "--out", str(out), "--plot", str(image)]
    assert planning.main(arguments) == 0
    rows = result(out)["rows"]
    assert [row["workload"] for row in rows] == list(planning.WORKLOADS)
    for row in rows:
        assert set(row["steps"]) == set(planning.STEPS)
        assert all(step["ms"] > 0 for step in row["steps"].values())
    assert rows[0]["replicated"] > 5 * rows[0]["distinct"]
    assert image.stat().st_size > 10_000
