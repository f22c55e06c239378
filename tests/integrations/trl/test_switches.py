"""Settings that users turn on: Liger, torch.compile and offloading in trainers of samples, a
float32 head in GRPO."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer
from trl.models.activation_offloading import OffloadActivations

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.trl import PrefixTreeDPOTrainer, PrefixTreeGRPOTrainer
from tests.integrations.trl.runs import (
    SameOrder,
    assert_equal_runs,
    make,
    moved,
    rollouts,
    save_model,
    tiny_config,
    train,
)
from tests.integrations.trl.sample_runs import DPO, KTO, REWARD, SFT, Maker, make_dpo, ratios
from tests.support.full import mostly
from tests.support.liger import interpret, keep_transformers

MAKERS = {"dpo": DPO, "sft": SFT, "kto": KTO, "reward": REWARD}
SGD = {"optim": "sgd", "learning_rate": 0.3}
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3}


@pytest.fixture(params=mostly(MAKERS, ["dpo", "sft"]))
def maker(request: pytest.FixtureRequest) -> Maker:
    return MAKERS[request.param]


def check(folder: Path, ours: Any, theirs: Any, **options: Any) -> None:
    assert moved(theirs, folder) > 1e-3
    assert min(ratios(ours)) > 1.5
    assert_equal_runs(ours, theirs, **options)


# ---- layers of others, compiled models -----------------------------------------------------------


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning:liger_kernel.*")
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_ligers_layers(one_layer: Path, maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel")
    keep_transformers(monkeypatch)
    interpret(monkeypatch)
    ours, theirs = maker.trained(
        one_layer,
        use_liger_kernel=True,
        liger_kernel_config={"rms_norm": False, "fused_linear_cross_entropy": False},
        gradient_checkpointing=False,
        max_steps=1,
        gradient_accumulation_steps=1,
    )
    assert "LigerSwiGLU" in repr(ours.model)
    # the reference has transformers' MLPs, so before any update rewards are rounding
    check(one_layer, ours, theirs, wanted=lambda name: name != "rewards/accuracies")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_models(one_layer: Path, maker: Maker) -> None:
    """The policy, and a reference, which then has no truth value."""
    torch._dynamo.reset()
    ours = maker.make(maker.ours, one_layer, torch_compile=True, torch_compile_backend="eager")
    ours.train()
    kinds = [ours.model_wrapped, *([ours.ref_model] if maker in (DPO, KTO) else [])]
    assert {type(model).__name__ for model in kinds} == {"OptimizedModule"}
    theirs = maker.make(maker.stock, one_layer)
    theirs.train()
    check(one_layer, ours, theirs)


def test_precomputed_references_with_a_switch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's constructor computes them, before ours has checked the settings."""
    on_the_cpu(monkeypatch)
    made = make_dpo(
        PrefixTreeDPOTrainer, folder, activation_offloading=True, precompute_ref_log_probs=True
    )
    assert "ref_chosen_logps" in made.train_dataset.column_names


# ---- offloading ----------------------------------------------------------------------------------


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's hooks move tensors from the CPU to the CPU, without streams, small ones too."""
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)
    init = OffloadActivations.__init__

    def plain(self: OffloadActivations, **_: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
            init(self, use_pin_memory=False, use_streams=False, min_offload_size=16)

    monkeypatch.setattr(OffloadActivations, "__init__", plain)


def counted(trainer: Any) -> list[int]:
    """A list that grows by 1 for each saved tensor that moves, and by 0 for each that stays."""
    context, moves = trainer.maybe_activation_offload_context, []
    pack: Callable[[torch.Tensor], int] = context.pack_hook

    def packed(tensor: torch.Tensor) -> int:
        number = pack(tensor)
        moves.append(int(context.tracker[number][1]))
        return number

    context.pack_hook = packed
    return moves


KEPT = {"gradient_checkpointing": False}
OFFLOADED = {"layers kept": KEPT, "layers recomputed": {}, "adamw": {**KEPT, **ADAMW}}


@pytest.mark.parametrize("name", mostly(OFFLOADED, ["layers kept"]))
def test_offloading(folder: Path, maker: Maker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    runs = []
    for kind in (maker.ours, maker.stock):
        run = maker.make(kind, folder, activation_offloading=True, **OFFLOADED[name])
        moves = counted(run)
        run.train()
        # two layers, two steps of two batches
        assert sum(moves) > 2 * 2 * 2
        runs.append(run)
    check(folder, *runs)


def test_measured_plans_do_not_know_of_it(
    folder: Path, maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_cpu(monkeypatch)
    with pytest.raises(UnsupportedError, match="recompute='auto' with activation_offloading: pla"):
        maker.make(maker.ours, folder, activation_offloading=True, options={"recompute": "auto"})


# ---- a head in float32 ---------------------------------------------------------------------------


def scored(kind: type[GRPOTrainer], folder: Path, **arguments: Any) -> torch.Tensor:
    """Log-probabilities of six rows, of which three begin alike, in evaluation."""
    made = make(kind, folder, beta=0.0, gradient_checkpointing=False, **arguments)
    ids = torch.randint(3, 250, (6, 32), generator=torch.Generator().manual_seed(0))
    ids[1:3, :16] = ids[0, :16]
    with torch.no_grad():
        rest = ids, torch.ones_like(ids), 20
        found: torch.Tensor = made._get_per_token_logps_and_entropies(made.model.eval(), *rest)[0]
    return found.float()


@pytest.mark.parametrize("tied", mostly([False, True], [False]))
def test_a_head_in_float32(tmp_path: Path, tied: bool) -> None:
    """Under autocast: as near to float32 as TRL's head, and another than in bfloat16."""
    config = tiny_config(tie_word_embeddings=tied, hidden_size=128, initializer_range=0.15)
    folder = save_model(tmp_path, config)
    exact = scored(GRPOTrainer, folder)
    ours, theirs, halved = (
        scored(kind, folder, bf16=True, cast_lm_head_to_fp32=head)
        for kind, head in (
            (PrefixTreeGRPOTrainer, True),
            (GRPOTrainer, True),
            (PrefixTreeGRPOTrainer, False),
        )
    )
    errors = [float((found - exact).abs().mean()) for found in (ours, theirs)]
    print(f"mean errors: ours {errors[0]:.4f}, TRL's {errors[1]:.4f}")
    assert errors[0] == pytest.approx(errors[1], rel=0.1)
    # all else is the same, so the head is what differs
    assert (ours - halved).abs().mean() > 1e-3


@pytest.mark.parametrize("tied", mostly([False, True], [True]))
@pytest.mark.parametrize("optimizer", mostly([{}, SGD], [SGD]), ids=["adamw", "sgd"])
def test_a_run_with_a_head_in_float32(
    tmp_path: Path, tied: bool, optimizer: dict[str, Any]
) -> None:
    folder = save_model(tmp_path, tiny_config(tie_word_embeddings=tied))
    arguments = {
        "cast_lm_head_to_fp32": True,
        "max_steps": 2,
        "options": {"rollout_func": rollouts},
        **optimizer,
    }
    ours = train(PrefixTreeGRPOTrainer, folder, **arguments)
    theirs = train(SameOrder, folder, **arguments)
    assert moved(theirs, folder) > 4e-4
    assert_equal_runs(ours, theirs)
