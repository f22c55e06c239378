"""The benchmark suite's own code, on the CPU and tiny: what it checks, refuses, counts and fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prefixtree import PrefixForest, TreeMask, pack, tree_attention
from prefixtree.cost import model_cost, visible_pairs
from tests.benchmarks import benchmark_scripts
from tests.benchmarks.benchmark_scripts import gpu_check
from tests.support.cli_runs import one_thread
from tests.support.models import let_wrong_masks_run

NAMES = (
    "against",
    "depth",
    "grouper",
    "head",
    "layer",
    "layers",
    "memory",
    "model",
    "peers",
    "planning",
    "plots",
    "replicated",
    "runs",
)
TINY = ["--device", "cpu", "--scale", "0.02", "--repeats", "1"]


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    with benchmark_scripts.scripts(*NAMES) as modules:
        yield SimpleNamespace(**modules)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def result(path: Path) -> dict[str, Any]:
    """A strict reader: NaN and infinity are no JSON."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} in {path}")

    return json.loads(path.read_text(), parse_constant=refuse)


def causal(q: Any, k: Any, v: Any, mask: TreeMask, **options: Any) -> Any:
    """Attention that sees every earlier token: what packing without a tree mask computes."""
    if mask.subtree_end.unique().numel() > 1:
        mask = TreeMask(np.full(mask.num_tokens, mask.num_tokens))
    return tree_attention(q, k, v, mask, **options)


# ---- every script, from beginning to end --------------------------------------------------------


def test_depth(scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "depth.json", tmp_path / "depth.png"
    some = ["--depths", "1", "5", "--nodes", "512", "--scale", "0.01"]
    assert scripts.depth.main([*TINY, *some, "--out", str(out), "--plot", str(picture)]) == 0
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
    assert picture.stat().st_size > 20_000
    # what an earlier run wrote is drawn again, and not run again
    again = tmp_path / "again.png"
    assert scripts.depth.main(["--read", str(out), "--plot", str(again)]) == 0
    assert again.stat().st_size > 20_000
    assert "5 green, 0 out of memory, 0 red" in capsys.readouterr().out


def test_peers(scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "peers.json", tmp_path / "peers.png"
    some = ["--workloads", "4K then 4-2-2-1 x 1K", "documents 32 x 4K", "--scale", "0.01"]
    assert scripts.peers.main([*TINY, *some, "--out", str(out), "--plot", str(picture)]) == 0
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
    assert matrices["forward_tflops"] > 0 and picture.stat().st_size > 10_000
    assert scripts.peers.main(["--read", str(out)]) == 0
    assert "4 green, 0 out of memory, 0 red" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["peers", "depth", "layer", "model", "memory"])
def test_a_side_that_does_not_exist_is_refused(scripts: Any, script: str) -> None:
    """Not run as another under its name."""
    with pytest.raises(SystemExit):
        getattr(scripts, script).main([*TINY, "--sides", "fa3"])


def test_a_peer_that_does_not_exist_is_refused(scripts: Any) -> None:
    with pytest.raises(ValueError, match="side 'fa3': expected one of fa2, fa4, own"):
        scripts.replicated.peer("fa3", [4], torch.device("cpu"), torch.float32)


def test_dense_attention_is_the_same_by_every_kernel(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's kernels by the one that a CPU has; and one that is not causal is red."""
    everything = dict.fromkeys(scripts.peers.SDPA, scripts.peers.SDPBackend.MATH)
    monkeypatch.setattr(scripts.peers, "SDPA", everything)
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
    assert scripts.peers.ceiling("own", known, options)["red"] == []
    found = scripts.peers.ceiling("cudnn", known, options)
    assert found["red"] == [] and set(found["check"]) == {"out", "dq", "dk", "dv"}
    right = scripts.peers.dense
    monkeypatch.setattr(
        scripts.peers, "dense", lambda side, count, *rest: right(side, count // 2, 82, options)
    )
    found = scripts.peers.ceiling("fa2", known, options)
    assert "out" in found["red"] and "forward_ms" not in found


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_flex_attention_sees_the_tree(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    mask = pack(scripts.depth.depth_forest(3, 0.01)).mask
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(mask.num_tokens, h, 16, generator=generator) for h in (4, 2, 2))
    expected = tree_attention(q, k, v, mask)
    torch.testing.assert_close(scripts.against.flex(mask)(q, k, v), expected)


@pytest.mark.parametrize(("attend", "is_right"), [(tree_attention, True), (causal, False)])
def test_what_runs_over_the_forest_is_checked_as_well(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attend: Any, is_right: bool
) -> None:
    monkeypatch.setattr(scripts.replicated, "missing", lambda side, device: None)
    monkeypatch.setattr(scripts.against, "flex", lambda mask: partial(attend, mask=mask))
    some = ["--workloads", "4K then 4-2-2-1 x 1K", "--scale", "0.01", "--ceilings"]
    out = tmp_path / "peers.json"
    code = scripts.peers.main([*TINY, *some, "--sides", "own", "flex", "--out", str(out)])
    (row,) = result(out)["rows"]
    assert code == (not is_right) and ("flex out" in row["red"]) == (not is_right)
    sides = {"own", "flex"} if is_right else {"own"}
    assert set(row["speedup"]) == sides and set(row["times"]) == {"packed", *sides}
    assert set(row["efficiency"]) == {"own"}


def test_depth_bounds_by_hand(scripts: Any) -> None:
    """Fixed leaves and path lengths; the bound grows with the depth."""
    bounds = []
    for depth in scripts.depth.FORKS:
        forest = scripts.depth.depth_forest(depth, 1.0)
        assert forest.num_sequences == 128 and forest.depth == depth
        assert abs(forest.sequence_lengths - 4096).max() <= depth
        lengths = forest.sequence_lengths.astype(float)
        pairs = (lengths * (lengths + 1) / 2).sum()
        bounds.append(pairs / scripts.replicated.pairs(forest))
    assert bounds[0] == 1 and bounds == sorted(bounds) and bounds[-1] > 2
    for branching, forks in scripts.depth.BRANCHINGS.items():
        for node in scripts.depth.NODES:
            forest = scripts.depth.branching_forest(branching, node, 1.0)
            assert 0.5 < forest.num_replicated_tokens / scripts.depth.TOKENS < 2
            assert forest.depth == forks + 1 and (forest.node_length == node).all()


def test_layer(scripts: Any, tmp_path: Path) -> None:
    out, picture = tmp_path / "layer.json", tmp_path / "layer.png"
    some = ["--prompts", "5120", "--micro-batches", "1", "3"]
    assert scripts.layer.main([*TINY, *some, "--out", str(out), "--plot", str(picture)]) == 0
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
    assert picture.stat().st_size > 10_000


def test_model(scripts: Any, tmp_path: Path) -> None:
    rows = []
    for turn in range(1, 5):
        ids = [*range(2000), *range(10_000 * turn, 10_000 * turn + 1000)]
        mask = [0] * 2000 + [1] * 1000
        rows.append({"group": "a", "token_ids": ids, "loss_mask": mask, "turn_ends": [2500, 3000]})
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, top = tmp_path / "model.json", tmp_path / "profile.txt"
    picture = tmp_path / "model.png"
    where = ["--out", str(out), "--profile", str(top), "--plot", str(picture)]
    some = ["--layers", "1", "--micro-batches", "32", "--rollouts", str(rollouts)]
    assert scripts.model.main([*TINY, *some, *where]) == 0
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
    assert picture.stat().st_size > 10_000


# dynamo's own look at .grad of its inputs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_model_of_compiled_layers(scripts: Any, tmp_path: Path) -> None:
    out = tmp_path / "model.json"
    some = ["--layers", "1", "--cases", "longreason", "--micro-batches", "32"]
    assert scripts.model.main([*TINY, *some, "--layers-by", "compile", "--out", str(out)]) == 0
    data = result(out)
    assert data["layers_by"] == "compile" and set(data["checks"]) == {"own", "packed"}
    # peers come in place of the attention function, which compiled code would not see
    assert {"fa2", "fa4"} <= set(data["environment"]["skipped"])
    assert [row["red"] for row in data["rows"]] == [[], []]


def test_liger_replaces_layers_and_no_loss(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    liger = SimpleNamespace(apply_liger_kernel_to_qwen3=lambda **given: asked.update(given))
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=liger))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    scripts.layers.faster_layers("model", "liger")
    assert asked.pop("model") == "model" and set(asked.values()) == {False}
    assert set(asked) == {"cross_entropy", "fused_linear_cross_entropy"}


def test_memory(scripts: Any, tmp_path: Path) -> None:
    out, picture = tmp_path / "memory.json", tmp_path / "memory.png"
    some = ["--layers", "2", "--prompts", "2048", "4096", "--counts", "4", "8"]
    assert scripts.memory.main([*TINY, *some, "--out", str(out), "--plot", str(picture)]) == 0
    data = result(out)
    assert len(data["rows"]) == 8 and set(data["fits"]) == {"packed", "fa2"}
    tokens = {(r["prompt"], r["count"], r["side"]): r["tokens"] for r in data["rows"]}
    assert tokens[41, 8, "packed"] == 41 + 8 * 10 and tokens[41, 8, "fa2"] == 8 * 51
    assert picture.stat().st_size > 10_000


def test_head(scripts: Any, tmp_path: Path) -> None:
    out = tmp_path / "head.json"
    some = ["--dtype", "float16", "--heads", "Qwen3-0.6B", "Gemma-2-9B, softcap 30"]
    assert scripts.head.main([*TINY, *some, "--out", str(out)]) == 0
    rows = result(out)["rows"]
    assert [row["side"] for row in rows] == ["triton", "torch", "eager"] * 2
    assert all(row["ms"] > row["forward_ms"] > 0 and row["red"] == [] for row in rows)


@pytest.mark.parametrize("wrong", ["score", "gradient"])
def test_a_head_is_red_where_its_kernels_are_wrong(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    from prefixtree.kernels.triton import head as fused

    right = getattr(fused, wrong)

    def off(*given: Any) -> None:
        right(*given)
        # what a kernel writes comes last
        given[-1].mul_(1.01)

    monkeypatch.setattr(fused, wrong, off)
    out = tmp_path / "head.json"
    some = ["--dtype", "float16", "--heads", "Qwen3-0.6B", "--sides", "triton", "torch"]
    assert scripts.head.main([*TINY, *some, "--out", str(out)]) == 1
    first, second = result(out)["rows"]
    assert first["red"] and "ms" not in first and second["red"] == []


def test_planning(scripts: Any, tmp_path: Path) -> None:
    out, picture = tmp_path / "planning.json", tmp_path / "planning.png"
    arguments = ["--sizes", "3000", "--repeats", "1", "--out", str(out), "--plot", str(picture)]
    assert scripts.planning.main(arguments) == 0
    rows = result(out)["rows"]
    assert [row["workload"] for row in rows] == list(scripts.planning.WORKLOADS)
    for row in rows:
        assert set(row["steps"]) == set(scripts.planning.STEPS)
        assert all(step["ms"] > 0 for step in row["steps"].values())
    assert rows[0]["replicated"] > 5 * rows[0]["distinct"]
    assert picture.stat().st_size > 10_000


def test_the_script_has_the_steps(tmp_path: Path) -> None:
    tiny = "--device cpu --scale 0.02 --repeats 1"
    words = {
        "BACKEND": "sdpa",
        "MEMORY_ARGS": f"{tiny} --layers 1 --prompts 2048 --counts 4",
    }
    done = gpu_check(tmp_path, "memory", **words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all done: memory"
    assert len(result(tmp_path / "out" / "memory.json")["rows"]) == 2


# ---- checks that must turn red ------------------------------------------------------------------


def test_depth_is_red_where_the_tree_is_ignored(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(scripts.against, "tree_attention", causal)
    out = tmp_path / "depth.json"
    assert scripts.depth.main([*TINY, "--depths", "4", "--nodes", "--out", str(out)]) == 1
    row = result(out)["rows"][0]
    assert "out" in row["red"] and "times" not in row and "speedup" not in row
    assert "RED: red: out" in capsys.readouterr().out


def test_depth_is_red_where_the_replicated_side_is_wrong(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_sequence(lengths: Any, device: Any, dtype: Any) -> Any:
        return "wrong", right([sum(lengths)], device, dtype)[1]

    right = scripts.replicated.replicated_attention
    monkeypatch.setattr(scripts.replicated, "replicated_attention", one_sequence)
    out = tmp_path / "depth.json"
    assert scripts.depth.main([*TINY, "--depths", "4", "--nodes", "--out", str(out)]) == 1
    row = result(out)["rows"][0]
    assert "fa2 out" in row["red"] and set(row["times"]) == {"packed", "own"}
    assert set(row["speedup"]) == {"own"}


@pytest.mark.parametrize("name", ["layer", "model", "memory"])
def test_models_are_red_where_the_tree_is_ignored(
    scripts: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packed side alone: its forest is a tree, those of the others are chains."""
    import prefixtree.integrations.transformers as integration

    def ignoring(q: Any, k: Any, v: Any, mask: TreeMask, **options: Any) -> Any:
        # chains stay what they are: their first token's subtree ends before another's begins
        ends = mask.subtree_end
        is_tree = bool((ends[1:] < ends[:-1]).any())
        return (causal if is_tree else tree_attention)(q, k, v, mask, **options)

    monkeypatch.setattr(integration, "tree_attention", ignoring)
    let_wrong_masks_run(monkeypatch)
    out = tmp_path / "out.json"
    few = {
        "layer": ["--prompts", "5120", "--micro-batches", "2", "--sides", "packed", "own"],
        "model": ["--layers", "1", "--cases", "longreason", "--sides", "own", "packed"],
        "memory": ["--layers", "1", "--prompts", "2048", "--counts", "4"],
    }[name]
    assert getattr(scripts, name).main([*TINY, *few, "--out", str(out)]) == 1
    for row in result(out)["rows"]:
        assert bool(row["red"]) == (row["side"] == "packed")
        if row["red"]:
            assert not {"ms", "seconds", "peak_bytes"} & set(row)


def test_log_probabilities_that_drift_are_red(scripts: Any) -> None:
    mine = {b"a": torch.tensor([-1.0, 0.0, -2.0]), b"b": torch.tensor([-3.0])}
    theirs = {b"a": torch.tensor([-2.5, 0.0, -2.0]), b"b": torch.tensor([-3.0])}
    # one of three scored tokens differs
    assert scripts.model.drift(mine, theirs) == pytest.approx(1.5 / 3)
    assert scripts.model.drift(mine, theirs) > scripts.model.DRIFT


def test_planning_is_red_where_the_forest_is_wrong(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Sequences in another order, and a forest without any sharing."""
    planning = scripts.planning
    sequences = planning.groups(3000)
    ends = lambda f: np.repeat(f.node_subtree_end, f.node_length)  # noqa: E731
    turned = PrefixForest.from_sequences(sequences[::-1])
    assert planning.check(sequences, turned, ends(turned)) == ["sequences"]
    apart = PrefixForest.from_sequences(sequences, keys=range(len(sequences)))
    assert planning.check(sequences, apart, ends(apart)) == ["distinct tokens"]
    right = PrefixForest.from_sequences(sequences)
    assert planning.check(sequences, right, ends(right)) == []
    flex = planning.flex_mask
    with monkeypatch.context() as patch:
        patch.setattr(planning, "flex_mask", lambda end: flex(torch.full_like(end, len(end))))
        assert planning.check(sequences, right, ends(right)) == ["tiles"]
    monkeypatch.setattr(planning, "check", lambda *_: ["sequences"])
    out = tmp_path / "planning.json"
    assert planning.main(["--sizes", "3000", "--out", str(out)]) == 1
    assert all("steps" not in row for row in result(out)["rows"])
    assert "RED: sequences" in capsys.readouterr().out


# ---- out of memory ------------------------------------------------------------------------------


def test_out_of_memory_is_a_row_and_the_case_runs_with_fewer_layers(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    right = scripts.model.Update.learn

    def learn(self: Any, at: int, old: Any) -> None:
        layers = self.model.config.num_hidden_layers
        if layers > 1 and self._packed[at].num_tokens > 900:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")
        right(self, at, old)

    monkeypatch.setattr(scripts.model.Update, "learn", learn)
    out = tmp_path / "model.json"
    some = ["--layers", "2", "1", "--micro-batches", "32", "--sides", "own", "packed"]
    some += ["--cases", "longreason"]
    assert scripts.model.main([*TINY, *some, "--out", str(out)]) == 0
    rows = result(out)["rows"]
    told = [(row["layers"], row["side"], "seconds" in row) for row in rows]
    assert told == [(2, "own", False), (2, "packed", True), (1, "own", True), (1, "packed", True)]
    assert rows[0]["out_of_memory"] == "CUDA out of memory. Tried to allocate 9 GiB."
    assert "of_bound" not in rows[1] and "of_bound" in rows[3]
    assert "3 green, 1 out of memory, 0 red or failed" in capsys.readouterr().out


def test_an_error_is_a_failed_row(scripts: Any, tmp_path: Path) -> None:
    options = scripts.runs.parse(scripts.runs.parser("x"), ["--out", str(tmp_path / "o.json")])
    report = scripts.runs.Report(options)

    def broken() -> dict[str, Any]:
        raise RuntimeError("an illegal address")

    row = report.attempt({"case": 1}, broken)
    assert row == {"case": 1, "failed": "RuntimeError: an illegal address"}
    assert result(tmp_path / "o.json")["rows"] == [row]
    from rich.table import Table

    assert report.finish(Table()) == 1


# ---- what is counted and fitted -----------------------------------------------------------------


def test_chains_are_the_replicated_batch(scripts: Any) -> None:
    sequences = [np.array(s) for s in ([1, 2, 3], [1, 2, 4, 5], [1, 2], [9])]
    forest = PrefixForest.from_sequences(sequences)
    apart = scripts.replicated.chains(forest)
    found = pack(apart).unpack(pack(apart).input_ids)
    assert [x.tolist() for x in found] == [s.tolist() for s in sequences]
    assert apart.num_tokens == forest.num_replicated_tokens
    # in the order in which another's attention takes them
    assert pack(apart).input_ids.tolist() == np.concatenate(sequences).tolist()
    ids = pack(forest).input_ids
    assert ids[scripts.replicated.copies(forest)].tolist() == np.concatenate(sequences).tolist()
    assert scripts.replicated.pairs(forest) == 3 + 3 + 3 + 4 + 1
    assert scripts.replicated.pairs(apart) == 6 + 10 + 3 + 1


def test_flops_of_an_8b_forward(scripts: Any) -> None:
    """2 FLOPs a weight and token; 4 D H a pair and layer."""
    shape = scripts.layers.config(36, False)
    flops = scripts.layers.flops(model_cost(shape), 10, 55, 7)
    weights = 36 * (4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 12288)
    assert flops.linear == pytest.approx(2 * weights * 10)
    assert flops.attention == pytest.approx(4 * 128 * 32 * 55 * 36)
    assert flops.head == 2 * 4096 * 151_936 * 7
    assert flops.total(3, 3.5, 3) == 3 * flops.linear + 3.5 * flops.attention + 3 * flops.head


def test_responses_are_the_first_of_more(scripts: Any) -> None:
    lengths = scripts.layers.response_lengths(32, 1.0)
    assert lengths[:4] == scripts.layers.response_lengths(32, 1.0)[:4]
    assert min(lengths) >= 131 and max(lengths) <= 2048 and len(set(lengths)) > 20
    batch = scripts.layers.prompt_batch(50, lengths[:5], 512)
    assert batch.forest.num_tokens == 50 + sum(lengths[:5])
    assert sum(m.sum() for m in batch.masks) == sum(lengths[:5])


@pytest.mark.parametrize("side", ["packed", "fa2"])
def test_the_law_of_memory_is_found_again(scripts: Any, side: str) -> None:
    rows = []
    for prompt in (2000, 8000, 32000):
        for count in (4, 16):
            row = {"prompt": prompt, "count": count, "response": 500}
            copies = 1 if side == "packed" else count
            law = 5e9 + 7000 * copies * prompt + 9000 * count * 500
            rows.append({**row, "peak_with_held_bytes": law})
    fit = scripts.memory.fit(side, rows)
    assert [fit[k] for k in ("M0", "a", "b")] == pytest.approx([5e9, 7000, 9000], rel=1e-6)
    assert fit["r2"] == pytest.approx(1) and fit["cases"] == 6
    rows[0]["peak_with_held_bytes"] *= 3
    assert scripts.memory.fit(side, rows)["r2"] < 0.99
    assert scripts.memory.fit(side, rows[:3]) is None


def test_attention_is_given_back(scripts: Any) -> None:
    """Inside, the model attends by another function; behind, by the tree mask again, come what
    may."""
    layers = scripts.layers
    shape = layers.config(1, True)
    model = layers.model_of(shape, "cpu", "float32")
    packed = layers.prompt_batch(9, [3, 4], 512).packed("packed", "cpu")
    with torch.no_grad():
        first = model(**packed.model_inputs()).logits
        with scripts.replicated.attending(lambda q, k, v: q * 0):
            other = model(**packed.model_inputs()).logits
        with (
            pytest.raises(ZeroDivisionError),
            scripts.replicated.attending(lambda q, k, v: q * (1 // 0)),
        ):
            model(**packed.model_inputs())
        assert torch.equal(model(**packed.model_inputs()).logits, first)
    assert not torch.allclose(first, other)


def test_pieces_of_a_large_batch_attend_like_one(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(14, h, 8, generator=generator) for h in (4, 2, 2))
    arguments = ("fa2", [3, 4, 2, 5], torch.device("cpu"), torch.float32)
    whole = scripts.replicated.in_pieces(*arguments)(q, k, v)
    monkeypatch.setattr(scripts.replicated, "PIECE", 7)
    cut = scripts.replicated.in_pieces(*arguments)
    torch.testing.assert_close(cut(q, k, v), whole)
    own = scripts.replicated.in_pieces("own", *arguments[1:])
    torch.testing.assert_close(own(q, k, v), whole)


def test_an_odd_grouping_is_laid_out_as_prompt_then_responses(scripts: Any) -> None:
    forest = scripts.layers.prompt_batch(6, [2, 5, 3], 512).forest
    rows, lengths = scripts.layer._grouped_rows(forest)
    assert lengths == (6, [2, 5, 3]) and sorted(rows.tolist()) == list(range(16))
    positions = pack(forest).position_ids[rows].tolist()
    assert positions == [*range(6), 6, 7, *range(6, 11), *range(6, 9)]
    alone = scripts.layers.prompt_batch(6, [2], 512).forest
    assert scripts.layer._grouped_rows(alone)[1] == (7, [1])


def test_prefix_grouper_attends_like_the_tree(scripts: Any) -> None:
    pytest.importorskip("prefix_grouper", reason="prefix-grouper is not installed")
    forest = scripts.layers.prompt_batch(6, [2, 5, 3], 512).forest
    rows, (prompt, responses) = scripts.layer._grouped_rows(forest)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(16, h, 8, generator=generator) for h in (4, 2, 2))
    run = scripts.grouper.grouped_attention(prompt, responses, torch.device("cpu"), torch.float32)
    expected = tree_attention(q, k, v, pack(forest).mask)[rows]
    torch.testing.assert_close(run(q[rows], k[rows], v[rows]), expected)


def test_pairs_are_the_estimates_pairs(scripts: Any) -> None:
    forest = scripts.depth.depth_forest(3, 0.01)
    mask = pack(forest).mask
    assert scripts.replicated.pairs(forest) == int((mask.position_ids.long() + 1).sum())
    assert visible_pairs(np.array([0]), np.array([4]), None) == 10
