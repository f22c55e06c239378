"""The engine beside updates: switched off, other precisions, checkpoints, adapters, metrics."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from verl.utils import tensordict_utils as tu
from verl.utils.flops_counter import FlopsCounter
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import left_right_2_no_padding

import prefixtree as pt
from prefixtree.errors import UnsupportedError
from prefixtree.integrations.core.work import Work
from prefixtree.integrations.verl import PackedActorEngine, PackedCriticEngine, metrics
from prefixtree.integrations.verl import engine as engine_module
from prefixtree.integrations.verl.metrics import work_metrics
from prefixtree.models.compiled import compile_layers
from prefixtree.planning.micro_batch import micro_batch_of
from tests.integrations.verl.cases import CASES
from tests.integrations.verl.compare import check_same, difference
from tests.integrations.verl.runs import (
    FULL,
    actor_loss,
    batch_of,
    critic_loss,
    jagged,
    make_worker,
    parameters,
    rollouts,
    run,
)
from tests.support.operator_calls import count_attentions

SETTINGS = CASES["grpo"]
OFF = {"override_config": {"attn_implementation": "sdpa"}, "use_remove_padding": False}


def logprobs(worker: Any, rows: dict[str, list[Any]], **extra: Any) -> list[torch.Tensor]:
    """The responses' part of what a worker infers."""
    common = {"temperature": 0.8, "global_token_num": None, "compute_loss": False, **extra}
    values = worker.infer_batch(batch_of(rows, **common))["log_probs"].unbind()
    pairs = zip(values, rows["prompts"], strict=True)
    return [v[len(prompt) - 1 : -1] for v, prompt in pairs]


def test_fused_kernels_are_turned_off(models: Path) -> None:
    """They are a way to compute the same: verl's update without them."""
    fused = replace(SETTINGS, model_options={"use_fused_kernels": True})
    with pytest.warns(UserWarning, match="use_fused_kernels=True is turned off"):
        packed = run("prefixtree", models, fused)
    print(check_same(run("stock", models, SETTINGS), packed, SETTINGS))
    worker, rows = make_worker("prefixtree", models / "qwen3", fused), rollouts(1, 2, 4)
    assert not (worker.model_config.use_fused_kernels or worker.engine_config.use_fused_kernels)
    asked = logprobs(worker, rows, use_fused_kernels=True)
    assert difference(asked, logprobs(worker, rows)) == 0


# ---- the switch ----------------------------------------------------------------------------------


def test_without_the_flag_the_engine_is_verls_own_bit_for_bit(models: Path) -> None:
    # the library is loaded, the attention is not set
    settings = replace(SETTINGS, model_options=OFF)
    off = run("prefixtree", models, settings)
    stock = run("stock", models, SETTINGS)
    assert difference(off["infer"]["entropy"], stock["infer"]["entropy"]) == 0
    for name, parameter in stock["parameters"]["actor"].items():
        assert torch.equal(parameter, off["parameters"]["actor"][name])
    assert not any("prefixtree/" in name for name in off["metrics"])
    engine = make_worker("prefixtree", models / "qwen3", settings).engine
    assert isinstance(engine, PackedActorEngine)
    assert not engine.packs


@pytest.mark.usefixtures("unprobed")
def test_with_the_flag_the_model_runs_once_on_distinct_tokens(models: Path) -> None:
    rows = rollouts(1, groups=2, size=6)
    sequences = [torch.cat(p) for p in zip(rows["prompts"], rows["responses"], strict=True)]
    distinct = pt.PrefixForest.from_sequences(sequences).num_tokens
    assert distinct < sum(map(len, sequences)) / 2
    whole = replace(SETTINGS, tokens=10_000)
    buckets = replace(whole, engine={"pad_to_length": True, "pad_to_length_bucket": 256})
    for settings, expected in ((whole, distinct), (buckets, 256)):
        worker = make_worker("prefixtree", models / "qwen3", settings)
        seen: list[int] = []
        embedding = worker.engine.module.get_input_embeddings()
        embedding.register_forward_hook(lambda m, args, out, seen=seen: seen.append(out.shape[1]))
        logprobs(worker, rows)
        assert seen == [expected]


def test_verls_own_engine_does_not_train_with_the_attention(models: Path) -> None:
    # another vendor's GPU, where only verl's engine is registered: no silent causal mask
    options = {
        "external_lib": "prefixtree.integrations.verl",
        "override_config": {"attn_implementation": "prefixtree"},
        "use_remove_padding": True,
    }
    worker = make_worker("stock", models / "qwen3", replace(SETTINGS, model_options=options))
    assert type(worker.engine) is FSDPEngineWithLMHead
    with pytest.raises(ValueError, match="no tree_mask"):
        logprobs(worker, rollouts(1, groups=1, size=2))


# ---- other ways to run ---------------------------------------------------------------------------


def test_bfloat16_is_as_near_to_float32_as_verls_own(models: Path) -> None:
    # verl's default precision: bfloat16 parameters and autocast
    half = replace(SETTINGS, engine={"mixed_precision": None}, lr=0.01)
    exact = run("stock", models, replace(SETTINGS, lr=0.01))
    stock, packed = run("stock", models, half), run("prefixtree", models, half)

    def errors(results: Any, pick: Any) -> torch.Tensor:
        pairs = zip(pick(results), pick(exact), strict=True)
        return torch.cat([(a - b).abs().flatten() for a, b in pairs])

    for name in ("old_log_probs", "entropy", "ref_log_prob"):
        theirs = errors(stock, lambda r, name=name: r["infer"][name])
        ours = errors(packed, lambda r, name=name: r["infer"][name])
        assert 1e-4 < ours.max() < 2 * theirs.max(), name
        assert ours.mean() < 1.2 * theirs.mean(), name
    theirs = errors(stock, lambda r: list(r["parameters"]["actor"].values()))
    ours = errors(packed, lambda r: list(r["parameters"]["actor"].values()))
    assert ours.max() < 2 * theirs.max()
    assert ours.mean() < 1.2 * theirs.mean()


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize(("precision", "expected"), [(None, torch.bfloat16), (FULL, None)])
def test_the_model_runs_under_verls_autocast(
    precision: Any, expected: torch.dtype | None, models: Path
) -> None:
    settings = replace(SETTINGS, engine={"mixed_precision": precision})
    worker = make_worker("prefixtree", models / "qwen3", settings)
    seen = []

    def look(*args: Any) -> None:
        enabled = torch.is_autocast_enabled("cpu")
        seen.append(torch.get_autocast_dtype("cpu") if enabled else None)

    worker.engine.module.get_input_embeddings().register_forward_hook(look)
    logprobs(worker, rollouts(1, groups=1, size=2))
    assert set(seen) == {expected}


def test_the_reference_is_the_actor_without_its_adapter(models: Path) -> None:
    lora = replace(SETTINGS, model_options={"lora_rank": 4})
    workers = {v: make_worker(v, models / "qwen3", lora) for v in ("stock", "prefixtree")}
    plain = make_worker("prefixtree", models / "qwen3", SETTINGS)
    rows = rollouts(2, groups=2, size=4)
    for worker in workers.values():
        with torch.no_grad():
            for name, p in worker.engine.module.named_parameters():
                if "lora_B" in name:
                    p.add_(0.05)
    adapted = {v: logprobs(w, rows) for v, w in workers.items()}
    without = {v: logprobs(w, rows, no_lora_adapter=True) for v, w in workers.items()}
    assert difference(adapted["stock"], adapted["prefixtree"]) < 1e-5
    assert difference(without["stock"], without["prefixtree"]) < 1e-5
    assert difference(without["prefixtree"], logprobs(plain, rows)) < 1e-6
    assert difference(without["prefixtree"], adapted["prefixtree"]) > 1e-2


def test_outputs_are_zero_before_the_response_unless_asked_for(models: Path) -> None:
    rows = rollouts(5, groups=1, size=3)
    common = {"temperature": 1.0, "global_token_num": None, "compute_loss": False}
    outs = {}
    for vendor in ("stock", "prefixtree"):
        worker = make_worker(vendor, models / "qwen3", SETTINGS)
        outs[vendor] = worker.infer_batch(batch_of(rows, **common))["log_probs"].unbind()
        outs[vendor, "all"] = worker.infer_batch(
            batch_of(rows, return_model_output=True, **common)
        )["log_probs"].unbind()
    for i, prompt in enumerate(rows["prompts"]):
        start = len(prompt) - 1
        assert torch.equal(outs["prefixtree"][i][:start], torch.zeros(start))
        assert (outs["prefixtree"][i][start:-1] < 0).all()
        every = outs["prefixtree", "all"][i]
        # verl's last entry is the log-probability of another sequence's first token
        assert difference([every[:-1]], [outs["stock", "all"][i][:-1]]) < 1e-5
        assert every[-1] == 0


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm"])
def test_batches_of_the_v0_trainer(mode: str, models: Path) -> None:
    settings = replace(SETTINGS, loss_agg_mode=mode)
    # padded on both sides, made jagged by verl; nothing says where responses begin but the masks
    rows = rollouts(6, groups=2, size=4)
    width, length = (max(map(len, rows[name])) for name in ("prompts", "responses"))

    def padded(name: str, size: int, left: bool) -> torch.Tensor:
        return torch.stack(
            [
                nn.functional.pad(r, (size - len(r), 0) if left else (0, size - len(r)))
                for r in rows[name]
            ]
        )

    prompts, responses = padded("prompts", width, True), padded("responses", length, False)
    ids = torch.cat([prompts, responses], 1)
    mask = (ids != 0).long()  # no rollout holds a 0
    outs = {}
    for vendor in ("stock", "prefixtree"):
        data = left_right_2_no_padding(
            tu.get_tensordict(
                {
                    "prompts": prompts,
                    "responses": responses,
                    "input_ids": ids.clone(),
                    "attention_mask": mask,
                    "position_ids": mask.cumsum(1).sub(1).clamp(min=0),
                    "response_mask": padded("response_mask", length, False),
                    "old_log_probs": torch.full((8, length), -4.0),
                    "ref_log_prob": torch.full((8, length), -4.5),
                    "advantages": torch.randn(
                        8, length, generator=torch.Generator().manual_seed(0)
                    ),
                },
                {"temperature": 0.7, "calculate_entropy": True, "global_batch_size": 8},
            )
        )
        tu.assign_non_tensor(data, global_token_num=None)
        worker = make_worker(vendor, models / "qwen3", settings)
        worker.set_loss_fn(actor_loss(settings))
        metrics = tu.get(worker.train_batch(data), "metrics")
        outs[vendor] = [metrics["loss"], metrics["grad_norm"], *parameters(worker).values()]
    assert difference(outs["stock"], outs["prefixtree"]) < 1e-5
    assert outs["stock"][1] > 0.1


def test_saved_checkpoints_load_without_prefixtree(models: Path, tmp_path: Path) -> None:
    worker = make_worker("prefixtree", models / "qwen3", SETTINGS)
    worker.save_checkpoint(str(tmp_path))
    saved = json.loads((tmp_path / "huggingface" / "config.json").read_text())
    assert "prefixtree" not in json.dumps(saved)
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM;"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'huggingface')!r});"
        "assert 'prefixtree' not in sys.modules;"
        "print(float(model(torch.arange(2, 9)[None]).logits.float().sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # and verl goes on from it
    other = make_worker("prefixtree", models / "qwen3", SETTINGS)
    with torch.no_grad():
        for p in other.engine.module.parameters():
            p.add_(1)
    other.load_checkpoint(str(tmp_path))
    assert difference([*parameters(worker).values()], [*parameters(other).values()]) == 0


def test_a_critics_active_dropout_is_refused(models: Path) -> None:
    worker = make_worker("prefixtree", models / "qwen3", SETTINGS, "value_model")
    assert isinstance(worker.engine, PackedCriticEngine)
    worker.engine.module.dropout = nn.Dropout(0.1)
    worker.set_loss_fn(actor_loss(SETTINGS))
    data = batch_of(rollouts(1, groups=1, size=2), temperature=1.0, global_token_num=None)
    with pytest.raises(UnsupportedError, match="dropout"):
        worker.train_batch(data)


class Scaler:
    """A loss scaler of float16 training, which torch has for accelerators only."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.factor

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.div_(self.factor)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def update(self) -> None:
        pass


def update(worker: Any, rows: dict[str, list[Any]]) -> list[torch.Tensor]:
    """One update of all rows; the gradient's norm and the parameters after it."""
    is_actor = worker.engine.model_output == "log_probs"
    settings = replace(SETTINGS, algorithm="ppo")
    worker.set_loss_fn(actor_loss(settings) if is_actor else critic_loss())
    response = [torch.full((len(r),), -4.0) for r in rows["responses"]]
    data = batch_of(
        rows,
        old_log_probs=jagged(response),
        advantages=jagged([r * 0 + 1 for r in response]),
        values=jagged([r * 0 for r in response]),
        returns=jagged([r * 0 + i % 3 for i, r in enumerate(response)]),
        temperature=1.0,
        global_token_num=None,
        global_batch_size=8,
    )
    norm = tu.get(worker.train_batch(data), "metrics")["grad_norm"]
    return [norm, *parameters(worker).values()]


def test_the_scaled_loss_is_what_goes_backward(models: Path) -> None:
    rows = rollouts(8, groups=2, size=4)
    ends = []
    for scaler in (None, Scaler(64.0)):
        worker = make_worker("prefixtree", models / "qwen3", SETTINGS)
        worker.engine.scaler = scaler
        ends.append(update(worker, rows))
    assert difference(*ends) < 1e-6
    assert ends[0][0] > 0.1


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize(
    ("lora", "model_type"),
    [({}, "language_model"), ({"lora_rank": 4}, "language_model"), ({}, "value_model")],
    ids=["full", "lora", "critic"],
)
def test_layers_recompute_what_is_set(
    lora: dict[str, int], model_type: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, and other operators that run; verl's checkpointing is set beside it."""
    rows = rollouts(8, groups=2, size=4)
    ran = count_attentions(monkeypatch)
    ends, counts = [], []
    for recompute in (None, "all", "nothing", "auto"):
        override = {"attn_implementation": "prefixtree", "prefixtree_recompute": recompute}
        if recompute is None:
            del override["prefixtree_recompute"]
        options = {"override_config": override, **lora}
        settings = replace(SETTINGS, tokens=10_000, checkpointing=True, model_options=options)
        worker = make_worker("prefixtree", models / "qwen3", settings, model_type)
        assert worker.engine.recompute == recompute
        assert not hasattr(worker.engine.model_config.hf_config, "prefixtree_recompute")
        ran.clear()
        ends.append(update(worker, rows))
        counts.append(len(ran))
    assert all(difference(ends[0], end) == 0 for end in ends[1:])
    layers = counts[2]
    assert counts == [2 * layers, 2 * layers, layers, layers] and layers > 0


@pytest.mark.full
def test_layers_are_compiled_where_that_is_set(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's checkpointing holds in compiled layers; a plan of recomputation too."""
    # inductor would take its time on a CPU
    monkeypatch.setattr(engine_module, "compile_layers", partial(compile_layers, backend="eager"))
    rows = rollouts(8, groups=2, size=4)
    override: dict[str, Any] = {"attn_implementation": "prefixtree"}
    ends = []
    for more in ({}, {"prefixtree_compile": True, "prefixtree_recompute": "auto"}):
        options = {"override_config": override | more, "lora_rank": 4}
        settings = replace(SETTINGS, tokens=10_000, checkpointing=True, model_options=options)
        torch._dynamo.reset()
        counters.clear()
        worker = make_worker("prefixtree", models / "qwen3", settings)
        assert not hasattr(worker.engine.model_config.hf_config, "prefixtree_compile")
        ends.append(update(worker, rows))
        assert (counters["stats"]["unique_graphs"] > 0) == bool(more)
    torch._dynamo.reset()
    assert difference(*ends) < 1e-5


def test_settings_that_nothing_would_follow(models: Path) -> None:
    def make(model_type: str, engine: dict[str, Any] | None = None, **override: Any) -> None:
        settings = replace(SETTINGS, model_options={"override_config": override})
        settings = replace(settings, engine=settings.engine | (engine or {}))
        make_worker("prefixtree", models / "qwen3", settings, model_type)

    packs = {"attn_implementation": "prefixtree"}
    with pytest.raises(ValueError, match=r"prefixtree_recompute='some': expected one of 'auto'"):
        make("language_model", **packs, prefixtree_recompute="some")
    match = "is for FSDP2 actors and references with attn_implementation=prefixtree"
    for model_type in ("language_model", "value_model"):
        with pytest.raises(pt.UnsupportedError, match="is for FSDP engines with attn_impl"):
            make(model_type, attn_implementation="sdpa", prefixtree_recompute="auto")
    with pytest.raises(pt.UnsupportedError, match=match):
        make("value_model", **packs, prefixtree_compile=True)
    with pytest.raises(pt.UnsupportedError, match="is verified with strategy=fsdp2"):
        make("language_model", {"strategy": "fsdp"}, **packs, prefixtree_compile=True)
    with pytest.raises(ValueError, match="prefixtree_compile='yes': expected one of True, False"):
        make("language_model", **packs, prefixtree_compile="yes")


def test_what_packs_nothing_says_so_once(models: Path) -> None:
    settings = replace(SETTINGS, model_options={"override_config": {"attn_implementation": "sdpa"}})
    with pytest.warns(UserWarning, match="nothing is packed: the model runs 'sdpa'"):
        make_worker("prefixtree", models / "qwen3", settings)
    for shared in (True, False):
        worker = make_worker("prefixtree", models / "qwen3", SETTINGS)
        rows = rollouts(8, groups=2, size=4)
        if not shared:
            # no two begin alike
            rows["prompts"] = [p + 0 for p in rows["prompts"]]
            for row, prompt in enumerate(rows["prompts"]):
                prompt[0] = 2 + row
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(2):
                update(worker, rows)
        messages = [t for each in found if "shared nothing" in (t := str(each.message))]
        assert len(messages) == (not shared)
        assert all("trainer_mode=prefixtree_sync" in text for text in messages)


# ---- metrics -------------------------------------------------------------------------------------


def work_of(*batches: list[list[int]], sampled: list[np.ndarray] | None = None) -> Work:
    """Of micro-batches whose sequences stand one after the other in the batch."""
    whole = pt.PrefixForest.from_sequences([sequence for batch in batches for sequence in batch])
    starts = np.cumsum([0, *map(len, batches)])
    found = [micro_batch_of(whole, np.arange(a, b)) for a, b in itertools.pairwise(starts)]
    return metrics.work_of(found, sampled)


def test_work_counts_tokens_and_squares() -> None:
    chain = [[1, 2, 3, 4, 5]]
    work = work_of(chain)
    assert (work.replicated, work.packed, work.squares) == (5, 5, 25)
    work = work_of(chain, [[1, 2, 3], [1, 2, 4]])
    # the fork's second token adds 2 x 2 + 1
    assert (work.replicated, work.packed, work.squares) == (11, 9, 25 + 9 + 5)
    assert work.to_win is None


def test_what_the_policy_did_not_sample_could_be_shared() -> None:
    """Two batches with one timestamp each; in the second the policy wrote it."""
    same = list(range(10, 60))
    batch = [[1, 2, *same], [1, 3, *same]]
    given, wrote = np.zeros(52, bool), np.arange(52) >= 1
    assert work_of(batch, batch, sampled=[given, given, wrote, wrote]).to_win == 50
    assert work_of(batch, sampled=[given, given]).to_win == 50


def test_mfu_is_verls_for_sequences_that_share_nothing(models: Path) -> None:
    hf_config = make_worker("prefixtree", models / "qwen3", SETTINGS).model_config.hf_config
    counter = FlopsCounter(hf_config)
    lengths = [700, 300, 1200]
    sequences = [[i * 2000 + j for j in range(n)] for i, n in enumerate(lengths)]
    work = work_of(sequences)
    flops, promised = counter.estimate_flops(lengths, 2.0)
    alone = work_metrics(work, counter, 2.0, forward_only=False)
    assert alone["prefixtree/mfu"] == [pytest.approx(flops / promised)]
    assert "prefixtree/tokens_to_win" not in alone
    doubled = work_of(sequences * 2, sampled=[np.ones(n, bool) for n in lengths * 2])
    trained = work_metrics(doubled, counter, 2.0, forward_only=False)
    inferred = work_metrics(doubled, counter, 2.0, forward_only=True)
    assert trained["prefixtree/mfu"] == alone["prefixtree/mfu"]
    assert trained["prefixtree/replicated_over_packed"] == [2.0]
    assert trained["prefixtree/packed_tokens_per_second"] == [1100.0]
    assert trained["prefixtree/tokens_computed"] == trained["prefixtree/tokens_saved"] == [2200.0]
    assert trained["prefixtree/tokens_to_win"] == [0.0]
    assert trained["prefixtree/mfu"][0] == pytest.approx(3 * inferred["prefixtree/mfu"][0])


def test_mfu_is_left_out_where_verls_formula_is_not_quadratic(models: Path) -> None:
    from transformers import Gemma3TextConfig, Qwen3Config

    work = work_of([[1, 2, 3]])
    window = FlopsCounter(Gemma3TextConfig(sliding_window=512, num_hidden_layers=6))
    config = Qwen3Config()
    config.model_type = "no such model"
    for counter in (window, FlopsCounter(config)):
        names = {name.partition("/")[2] for name in work_metrics(work, counter, 1.0, False)}
        assert "tokens_saved" in names and "mfu" not in names


def test_seconds_are_those_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Verls:
        def train_batch(self, *_: Any) -> dict[str, Any]:
            return {"metrics": {}}

        infer_batch = train_batch

    class Engine(metrics.MeteredEngine, Verls):
        packs, _has_trained, _work, _flops_counter = True, True, None, None

    monkeypatch.setattr(metrics, "work_metrics", lambda *given: {"given": given[2:]})
    for call, forward_only in (("train_batch", False), ("infer_batch", True)):
        monkeypatch.setattr(metrics.time, "perf_counter", iter([10.0, 14.0]).__next__)
        found = getattr(Engine.__new__(Engine), call)(None, None)["metrics"]["given"]
        monkeypatch.undo()
        monkeypatch.setattr(metrics, "work_metrics", lambda *given: {"given": given[2:]})
        assert found == (4.0, forward_only)


def test_metrics_come_with_every_update_and_inference(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker("prefixtree", models / "qwen3", SETTINGS)
    # and one line at the start
    (line,) = [r.getMessage() for r in caplog.records if r.name == "prefixtree"]
    assert "packing is on" in line and "max_token_len_per_gpu=" in line and "'sdpa'" in line
    data = batch_of(rollouts(1, groups=2, size=4), temperature=1.0, global_token_num=None)
    tu.assign_non_tensor(data, compute_loss=False)
    metrics = tu.get(worker.infer_batch(data), "metrics")
    names = {name for name in metrics if name.startswith("prefixtree/")}
    wanted = {"replicated_over_packed", "packed_tokens_per_second", "mfu"}
    # nothing that nobody measured, as seconds saved
    wanted |= {"tokens_computed", "tokens_saved"}
    assert names == {f"prefixtree/{name}" for name in wanted}
    sequences = [row.tolist() for row in data["input_ids"].unbind()]
    worker.infer_batch(data)
    # counted anew in every call; more than distinct, as there are several micro-batches
    work = worker.engine._work
    assert work.replicated == sum(map(len, sequences))
    distinct = pt.PrefixForest.from_sequences(sequences).num_tokens
    assert distinct <= work.packed < min(2 * distinct, work.replicated)
