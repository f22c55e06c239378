"""Losses of verl that depend on how a mini-batch is cut into micro-batches are refused, or warned
of where two shuffles of verl's differ too; no others.

Every loss of verl's registry is run on two cuts of one mini-batch and its gradients are compared,
so that a loss of a later verl is judged by what it does.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss, value_loss

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.verl.refusals import CUT_MODES, check_loss
from tests.integrations.verl.cases import CASES
from tests.integrations.verl.compare import difference
from tests.integrations.verl.runs import batch_of, jagged, make_worker, parameters, rollouts

# two cuts of 8 samples, into micro-batches of any size and of one size
DYNAMIC = ([[0, 1, 2, 3, 4, 5, 6, 7]], [[6, 1, 4], [0, 3, 5, 7], [2]])
FIXED = ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 6, 2, 5], [7, 3, 4, 1]])


def aggregations() -> list[str]:
    """The modes that verl's `agg_loss` compares with: it has no registry."""
    modes = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(core_algos.agg_loss)))):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "loss_agg_mode":
            modes |= {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
    return sorted(modes)


def test_the_modes_are_found() -> None:
    assert {"token-mean", "seq-mean-token-sum-norm"} <= set(aggregations())
    assert {"vanilla", "geo_mean"} <= core_algos.POLICY_LOSS_REGISTRY.keys()


def actor_config(loss_mode: str = "vanilla", correction: Any = None, **changes: Any) -> Any:
    """All that a policy loss may have: clipped ratios, a KL loss, an entropy bonus."""
    policy = PolicyLossConfig(
        loss_mode=loss_mode,
        # so that tokens are chosen among the few there are
        clip_cov_ratio=0.1,
        clip_cov_lb=-100.0,
        clip_cov_ub=100.0,
        kl_cov_ratio=0.1,
        ppo_kl_coef=1.0,
        dro_beta=0.1,
        rollout_correction=correction or RolloutCorrectionConfig(rollout_is=None),
    )
    return FSDPActorConfig(
        **{
            "strategy": "fsdp2",
            "rollout_n": 4,
            "use_dynamic_bsz": True,
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "entropy_coeff": 0.02,
            "clip_ratio": 0.05,
            "clip_ratio_low": 0.05,
            "clip_ratio_high": 0.05,
            "policy_loss": policy,
            **changes,
        }
    )


def critic_config(**changes: Any) -> Any:
    return FSDPCriticConfig(strategy="fsdp2", use_dynamic_bsz=True, cliprange_value=0.3, **changes)


def gradient(loss: Callable[..., Any], cut: list[list[int]], padded: bool = False) -> torch.Tensor:
    """Of a loss, by every model output of a mini-batch that is cut so; `padded` as by v0."""
    torch.manual_seed(0)
    rows = rollouts(4, groups=2, size=4)
    tokens = [len(p) + len(r) for p, r in zip(rows["prompts"], rows["responses"], strict=True)]

    def drawn(lengths: list[int], scale: float) -> list[torch.Tensor]:
        return [scale * torch.randn(n) for n in lengths]

    responses = [len(r) for r in rows["responses"]]
    logprobs = drawn(tokens, 1.0)
    starts = [len(p) - 1 for p in rows["prompts"]]
    old = [
        full[at : at + n] + 0.1 * torch.randn(n)
        for full, at, n in zip(logprobs, starts, responses, strict=True)
    ]
    data = batch_of(
        rows,
        old_log_probs=jagged(old),
        ref_log_prob=jagged(drawn(responses, 1.0)),
        advantages=jagged(drawn(responses, 1.0)),
        returns=jagged(drawn(responses, 1.0)),
        values=jagged(drawn(responses, 1.0)),
    )
    tu.assign_non_tensor(
        data,
        dp_size=1,
        batch_num_tokens=int(data["loss_mask"].sum()),
        global_batch_size=len(tokens),
    )
    if padded:
        _pad(data)
    names = ("log_probs", "entropy", "values")
    outputs = {name: drawn(tokens, 1.0) for name in names} | {"log_probs": logprobs}
    leaves = [leaf.requires_grad_() for name in names for leaf in outputs[name]]
    for indices in cut:
        torch.manual_seed(1)
        chosen = {name: jagged([outputs[name][i] for i in indices]) for name in names}
        loss(model_output=chosen, data=tu.index_select_tensor_dict(data, indices))[0].backward()
    return torch.cat([torch.zeros_like(x) if x.grad is None else x.grad for x in leaves])


def _pad(data: Any) -> None:
    """Pads responses as the v0 trainer does, which says so in the batch."""
    longest = int(data["responses"].offsets().diff().max())
    tu.assign_non_tensor(data, max_response_len=longest)
    names = ("response_mask", "old_log_probs", "ref_log_prob", "advantages", "returns", "values")
    for name in names:
        data[name] = data[name].to_padded_tensor(0)


def depends(loss: Callable[..., Any], cuts: Any, padded: bool = False) -> bool:
    one, other = (gradient(loss, cut, padded) for cut in cuts)
    assert one.norm() > 0
    difference = float((one - other).norm() / one.norm())
    print(f"relative difference {difference:.1e}")
    assert difference < 1e-5 or difference > 1e-3
    return difference > 1e-3


def refused(loss: Callable[..., Any], dynamic: bool, padded: bool = False) -> str:
    """The message of the refusal, or of the warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_loss(loss, dynamic, padded)
        except UnsupportedError as error:
            return str(error)
    return "".join(str(warning.message) for warning in caught)


@pytest.mark.parametrize("cuts", [DYNAMIC, FIXED], ids=["dynamic", "fixed size"])
@pytest.mark.parametrize("mode", sorted(core_algos.POLICY_LOSS_REGISTRY))
def test_policy_losses(mode: str, cuts: Any) -> None:
    loss = partial(ppo_loss, config=actor_config(mode))
    message = refused(loss, dynamic=cuts is DYNAMIC)
    assert depends(loss, cuts) == bool(message), message
    assert not message or f"policy_loss.loss_mode={mode} " in message
    assert ("as those of two shuffles of verl's" in message) == (mode in CUT_MODES)


@pytest.mark.parametrize("cuts", [DYNAMIC, FIXED], ids=["dynamic", "fixed size"])
@pytest.mark.parametrize("factor", [None, 100])
@pytest.mark.parametrize("mode", aggregations())
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_aggregations(role: str, mode: str, factor: int | None, cuts: Any) -> None:
    config, function = {
        "actor": (actor_config, ppo_loss),
        "critic": (critic_config, value_loss),
    }[role]
    loss = partial(function, config=config(loss_agg_mode=mode, loss_scale_factor=factor))
    message = refused(loss, dynamic=cuts is DYNAMIC)
    assert depends(loss, cuts) == bool(message), message
    assert not message or f"loss_agg_mode={mode} " in message
    assert not message or "set loss_scale_factor" in message
    # the v0 trainer's batches have one length in all micro-batches
    loss = partial(function, config=config(loss_agg_mode=mode, loss_scale_factor=factor))
    assert not depends(loss, cuts, padded=True) and not refused(loss, cuts is DYNAMIC, padded=True)


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize(
    "options",
    [
        {"rollout_is": None},
        {"rollout_is": "token"},
        {"rollout_is": "sequence"},
        {"rollout_is": "token", "rollout_is_batch_normalize": True},
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
        {"rollout_is": None, "rollout_is_batch_normalize": True},
        {"rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.97_1.03"},
        {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.95_1.05"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_importance_weights_in_the_loss(loss_type: str, options: dict[str, Any]) -> None:
    correction = RolloutCorrectionConfig(bypass_mode=True, loss_type=loss_type, **options)
    loss = partial(ppo_loss, config=actor_config("bypass_mode", correction))
    message = refused(loss, dynamic=True)
    assert depends(loss, DYNAMIC) == bool(message), message
    assert not message or "rollout_is_batch_normalize=True" in message


def test_kl_cov_in_one_micro_batch_is_verls_own(models: Path) -> None:
    """(clip_cov draws among its tokens.)"""
    found = {}
    for vendor in ("stock", "prefixtree"):
        worker = make_worker(vendor, models / "qwen3", CASES["grpo, one micro-batch"])
        worker.set_loss_fn(partial(ppo_loss, config=actor_config("kl_cov")))
        start = parameters(worker)
        _train(worker)
        found[vendor] = parameters(worker)
    moved = [float((p - start[name]).abs().max()) for name, p in found["stock"].items()]
    apart = difference([*found["stock"].values()], [*found["prefixtree"].values()])
    print(f"moved {max(moved):.1e}, apart {apart:.1e}")
    assert sorted(moved)[len(moved) // 2] > 1e-3 and apart < 1e-6


def _train(worker: Any) -> Any:
    """One update, by draws of the same."""
    torch.manual_seed(2)
    rows = rollouts(1, groups=2, size=4)
    common = {"temperature": 1.0, "global_token_num": None}
    worker.infer_batch(batch_of(rows, compute_loss=False, **common))
    lengths = [len(r) for r in rows["responses"]]
    names = ("old_log_probs", "ref_log_prob", "advantages", "returns", "values")
    drawn = {name: jagged([torch.randn(n) for n in lengths]) for name in names}
    data = batch_of(rows, calculate_entropy=True, global_batch_size=8, **drawn, **common)
    return worker.train_batch(data)


def test_a_loss_of_ones_own() -> None:
    """Nothing is known of it, and it may have no configuration."""
    check_loss(lambda **inputs: None, True)
    check_loss(partial(ppo_loss, config=object()), True)


@pytest.mark.parametrize(
    ("model_type", "loss"),
    [
        ("language_model", partial(ppo_loss, config=actor_config("geo_mean"))),
        (
            "value_model",
            partial(value_loss, config=critic_config(loss_agg_mode="seq-mean-token-sum-norm")),
        ),
    ],
    ids=["actor", "critic"],
)
def test_the_engine_asks(model_type: str, loss: Any, models: Path) -> None:
    """Before anything is computed; not where nothing is packed, nor without a loss."""

    def train(vendor: str) -> Any:
        worker = make_worker(vendor, models / "qwen3", CASES["grpo"], model_type)
        worker.set_loss_fn(loss)
        return _train(worker)

    train("stock")
    with pytest.raises(UnsupportedError, match="depends on the cut into micro-batches"):
        train("prefixtree")
