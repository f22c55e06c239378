"""Real `train()` runs: the adapter against TRL's own trainer, from the same weights and seeds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig
from transformers.models.qwen3 import modeling_qwen3
from trl import GRPOTrainer, RLOOConfig

import prefixtree as pt
from prefixtree.integrations.trl import PrefixTreeGRPOTrainer
from tests.integrations.trl import rloo_runs
from tests.integrations.trl.runs import (
    SameOrder,
    assert_equal_runs,
    check_half_precision,
    count_once,
    make,
    moved,
    names_prefixtree,
    parameters,
    prompts,
    reward,
    rollouts,
    save_model,
    squared_distance,
    tiny_hybrid,
    tiny_mixture,
    tiny_vision,
    train,
    worst_parameter,
)
from tests.support.chat_tokenizer import CHATML, save_tokenizer
from tests.support.full import mostly
from tests.support.liger import interpret, keep_transformers
from tests.support.operator_calls import count_attentions

SGD = {"optim": "sgd", "learning_rate": 0.3}


FULL = pytest.mark.full
# ours, TRL's forward in our order, what both get, and how near they are
KINDS = pytest.mark.parametrize(
    "kinds",
    [
        (PrefixTreeGRPOTrainer, SameOrder, {"options": {"rollout_func": rollouts}}, 1e-5),
        pytest.param(
            (*rloo_runs.KINDS, {"config": RLOOConfig, "learning_rate": 0.1}, rloo_runs.RATIO),
            marks=FULL,
        ),
    ],
    ids=["grpo", "rloo"],
)


@pytest.mark.parametrize("optimizer", [{}, pytest.param(SGD, marks=FULL)], ids=["adamw", "sgd"])
def test_a_run_is_trls_own(folder: Path, optimizer: dict[str, Any]) -> None:
    """One micro-batch a generation, so that no shuffle shows: every metric is TRL's."""
    arguments = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 8,
        "options": {"eval_dataset": prompts()},
        **optimizer,
    }
    ours = train(PrefixTreeGRPOTrainer, folder, **arguments)
    theirs = train(GRPOTrainer, folder, **arguments)
    assert type(theirs) is GRPOTrainer
    assert moved(theirs, folder) > 5e-4
    kl = [log["kl"] for log in theirs.state.log_history if "kl" in log]
    assert kl[-1] > 1e-5  # the reference took part
    assert any("eval_loss" in log for log in ours.state.log_history)
    assert_equal_runs(ours, theirs)


@pytest.mark.parametrize("optimizer", [pytest.param({}, marks=FULL), SGD], ids=["adamw", "sgd"])
def test_accumulated_micro_batches(folder: Path, optimizer: dict[str, Any]) -> None:
    """Several micro-batches a step, which TRL fills in another order: what is a mean of their
    means (entropy, kl, clip ratios) depends on it, losses and parameters do not."""
    ours = train(PrefixTreeGRPOTrainer, folder, loss_type="dapo", **optimizer)
    theirs = train(GRPOTrainer, folder, loss_type="dapo", **optimizer)
    assert moved(theirs, folder) > 5e-4

    def is_a_sum(name: str) -> bool:
        return name not in ("kl", "entropy") and not name.startswith("clip_ratio")

    assert_equal_runs(ours, theirs, wanted=is_a_sum)
    ratio = [log["prefixtree/replication_ratio"] for log in ours.state.log_history if "loss" in log]
    # a group of 4: its prompt, longer than a completion, is packed once
    assert min(ratio) > 1.8


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss_type": "grpo", "scale_rewards": "batch"},
        # of the loss alone, which is TRL's
        pytest.param({"loss_type": "bnpo", "temperature": 0.7, "learning_rate": 0.1}, marks=FULL),
        {"loss_type": "dr_grpo", "num_iterations": 3, "max_steps": 4},
        pytest.param({"loss_type": "cispo", "epsilon_high": 5.0}, marks=FULL),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.0},
        {"entropy_coef": 0.05, "top_entropy_quantile": 0.5},
        # generation every 4 micro-batches of 2 steps: old log-probabilities are computed
        {"steps_per_generation": 4, "num_iterations": 1},
        # micro-batches that cut groups
        {"per_device_train_batch_size": 6},
        {
            "mask_truncated_completions": True,
            "pad_to_multiple_of": 8,
            "options": {"rollout_func": rollouts},
        },
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=lambda arguments: "-".join(arguments),
)
# of micro-batches: both sides have the same
@pytest.mark.filterwarnings("ignore:.*micro-batch:UserWarning")
def test_settings_of_the_loss(folder: Path, arguments: dict[str, Any]) -> None:
    """Every metric equals TRL's forward on the same micro-batches."""
    ours = train(PrefixTreeGRPOTrainer, folder, **{**SGD, **arguments})
    theirs = train(SameOrder, folder, **{**SGD, **arguments})
    assert moved(theirs, folder) > 1e-3
    assert_equal_runs(ours, theirs)


def test_multi_turn_rollouts_and_their_mask(folder: Path) -> None:
    """Answers of the environment are read and not trained on; branches meet at several depths."""
    arguments = {**SGD, "options": {"rollout_func": rollouts}, "max_completion_length": 40}
    ours = train(PrefixTreeGRPOTrainer, folder, **arguments)
    theirs = train(SameOrder, folder, **arguments)
    assert moved(theirs, folder) > 1e-3
    assert_equal_runs(ours, theirs)
    assert ours._buffered_inputs[0]["tool_mask"].eq(0).any()
    ratio = [log["prefixtree/replication_ratio"] for log in ours.state.log_history if "loss" in log]
    assert min(ratio) > 1.5

    def unmasked(chats: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        return {k: v for k, v in rollouts(chats, trainer).items() if k != "env_mask"}

    blind = train(
        PrefixTreeGRPOTrainer, folder, **{**arguments, "options": {"rollout_func": unmasked}}
    )
    assert worst_parameter(ours, blind)[0] > 1e-4


# both sides have the same micro-batches
@pytest.mark.filterwarnings("ignore:.*micro-batch:UserWarning")
@pytest.mark.parametrize("coefficient", [pytest.param(0.0, marks=FULL), 3.0])
def test_a_mixture_of_experts(
    coefficient: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its load-balancing loss and without, although the configuration asks for it."""
    config = tiny_mixture()
    config.output_router_logits = True
    folder = save_model(tmp_path, config)
    arguments = {
        **SGD,
        "options": {"rollout_func": rollouts},
        "router_aux_loss_coef": coefficient,
    }
    ours = train(PrefixTreeGRPOTrainer, folder, **arguments)
    theirs = train(SameOrder, folder, **arguments)
    assert moved(theirs, folder) > 1e-3
    assert_equal_runs(ours, theirs)
    losses = [log["aux_loss"] for log in ours.state.log_history if "aux_loss" in log]
    assert bool(losses) == (coefficient > 0)
    if coefficient > 0:
        # a loss that counts every packed token once would be seen
        count_once(monkeypatch)
        wrong = train(PrefixTreeGRPOTrainer, folder, **arguments, max_steps=2)
        first = [next(log["aux_loss"] for log in x.state.log_history) for x in (wrong, theirs)]
        assert abs(first[0] - first[1]) > 1e-4


@pytest.mark.parametrize("family", mostly(["qwen2_5_vl", "qwen3_vl", "qwen3_5"], ["qwen3_5"]))
def test_text_on_a_vision_checkpoint(family: str, tmp_path: Path) -> None:
    """With the tokenizer as processing_class; the image encoder takes no part."""
    folder = save_tokenizer(tmp_path, CHATML)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(tiny_vision(family)).save_pretrained(folder)

    def run(trainer: type[GRPOTrainer]) -> GRPOTrainer:
        model = AutoModelForImageTextToText.from_pretrained(folder)
        assert any("visual" in name for name, _ in model.named_parameters())
        return train(trainer, folder, model=model, **SGD, max_steps=2)

    ours, theirs = run(PrefixTreeGRPOTrainer), run(SameOrder)
    start = parameters(AutoModelForImageTextToText.from_pretrained(folder))
    after = parameters(theirs.model)
    changes = {name: float((p - start[name]).abs().max()) for name, p in after.items()}
    assert max(changes.values()) > 1e-3
    assert max(change for name, change in changes.items() if "visual" in name) == 0
    assert_equal_runs(ours, theirs)


@pytest.mark.parametrize(
    "family",
    mostly(
        ["qwen3_5_text", "nemotron_h", "granitemoehybrid", "deepseek_v32", "glm_moe_dsa"],
        ["granitemoehybrid", "glm_moe_dsa"],
    ),
)
def test_recurrent_layers_and_indexers(family: str, tmp_path: Path) -> None:
    """The model generates before anything is scored; Granite and GLM-5 show their attention no
    positions until they are prepared."""
    folder = save_model(tmp_path, tiny_hybrid(family))
    arguments = {**SGD, "max_steps": 2, "router_aux_loss_coef": 0.0}
    ours = train(PrefixTreeGRPOTrainer, folder, **arguments)
    theirs = train(SameOrder, folder, **arguments)
    assert moved(theirs, folder) > 1e-3
    assert_equal_runs(ours, theirs)
    ratio = [log["prefixtree/replication_ratio"] for log in ours.state.log_history if "loss" in log]
    assert min(ratio) > 1.8


@pytest.mark.parametrize(
    ("method", "settings"),
    [("LoraConfig", {"r": 4}), ("IA3Config", {"feedforward_modules": ["up_proj"]})],
)
def test_adapters_with_their_reference(folder: Path, method: str, settings: dict[str, Any]) -> None:
    """The reference is the model without its adapter."""
    peft = pytest.importorskip("peft")

    def adapter() -> Any:
        return getattr(peft, method)(target_modules=["q_proj", "v_proj", "up_proj"], **settings)

    # LoRA's A starts at random from the trainer's seed, B at 0
    arguments = {**SGD, "learning_rate": 1.0}
    ours = train(PrefixTreeGRPOTrainer, folder, options={"peft_config": adapter()}, **arguments)
    theirs = train(SameOrder, folder, options={"peft_config": adapter()}, **arguments)
    assert ours.ref_model is None
    assert max(log.get("kl", 0) for log in ours.state.log_history) > 1e-5
    assert_equal_runs(ours, theirs)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_adapter_beside_weights_of_4_bits(folder: Path) -> None:
    """QLoRA."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    runs = []
    for trainer in (PrefixTreeGRPOTrainer, SameOrder):
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map="cpu"
        )
        adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
        run = make(trainer, folder, model=model, options={"peft_config": adapter}, **SGD)
        # TRL makes it bfloat16, whose rounding is larger than what is compared
        for parameter in filter(lambda p: p.requires_grad, run.model.parameters()):
            parameter.data = parameter.data.float()
        run.train()
        assert "4bit" in type(model.model.layers[0].mlp.down_proj).__name__
        runs.append(run)
    assert_equal_runs(*runs)


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize(
    ("recompute", "lora"),
    [("nothing", False), pytest.param("auto", False, marks=FULL), ("auto", True)],
)
def test_layers_recompute_what_is_asked_for(
    folder: Path, recompute: Any, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number of attentions, whatever TRL's checkpointing says, and the same run."""
    peft = pytest.importorskip("peft")
    ran = count_attentions(monkeypatch)
    arguments = {**SGD, "max_steps": 2, "beta": 0.0, "num_iterations": 1}
    counts, runs = [], []
    for options in ({}, {"recompute": recompute}):
        given = {"rollout_func": rollouts, **options}
        if lora:
            given["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
        ran.clear()
        runs.append(train(PrefixTreeGRPOTrainer, folder, options=given, **arguments))
        counts.append(len(ran))
    # two layers, two steps of two micro-batches, which need old log-probabilities of none
    assert counts == [16, 8]
    assert_equal_runs(*runs, tolerance=1e-12)


# dynamo looks at it while it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_layers_compiled_one_by_one(folder: Path) -> None:
    """`compile_layers` on the trainer's model: every layer is compiled, and the run is the same."""
    arguments = {**SGD, "max_steps": 2, "beta": 0.0, "num_iterations": 1}
    given = {"rollout_func": rollouts, "recompute": "auto"}
    plain = train(PrefixTreeGRPOTrainer, folder, options=given, **arguments)
    compiled = make(PrefixTreeGRPOTrainer, folder, options=given, **arguments)
    backend = CompileCounterWithBackend("aot_eager")
    pt.compile_layers(compiled.model, backend=backend)
    compiled.train()
    assert backend.frame_count > 0
    assert_equal_runs(compiled, plain)


@KINDS
def test_mixed_precision(folder: Path, kinds: Any) -> None:
    """`bf16=True`, TRL's default: as near to a float32 run as TRL's own."""
    # one iteration: a token that rounding puts on the other side of a clip drowns the rest
    arguments = {**SGD, "num_iterations": 1, **kinds[2]}
    exact = train(kinds[1], folder, **arguments)
    ours, theirs = (train(kind, folder, bf16=True, **arguments) for kind in kinds[:2])
    wanted = parameters(exact.model)
    errors = [squared_distance(parameters(run.model), wanted) for run in (ours, theirs)]
    print(f"squared distance from float32: ours {errors[0]:.2e}, TRL's {errors[1]:.2e}")
    assert 0.5 * errors[1] < errors[0] < 1.5 * errors[1]
    assert moved(exact, folder) > 10 * worst_parameter(ours, exact)[0]


@FULL
@KINDS
def test_half_precision(folder: Path, kinds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {**SGD, "num_iterations": 1, **kinds[2]}
    check_half_precision(partial(train, **arguments), kinds[:2], folder, monkeypatch)


@FULL
# dynamo looks at it while it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@KINDS
def test_compiled_layers(one_layer: Path, kinds: Any) -> None:
    """`torch_compile=True`: the policy and the reference are compiled, and a few graphs serve all
    shapes."""
    arguments = {**SGD, "max_steps": 2, **kinds[2]}
    torch._dynamo.reset()
    counters.clear()
    ours = train(
        kinds[0],
        one_layer,
        torch_compile=True,
        torch_compile_backend="eager",
        **arguments,
    )
    for model in (ours.model_wrapped, ours.ref_model):
        assert type(model).__name__ == "OptimizedModule"
    assert 1 <= counters["stats"]["unique_graphs"] <= 6
    theirs = train(kinds[1], one_layer, **arguments)
    assert moved(theirs, one_layer) > 1e-3
    assert_equal_runs(ours, theirs, kinds[3])


@FULL
@pytest.mark.filterwarnings("ignore::UserWarning:liger_kernel.*")
@pytest.mark.filterwarnings(
    "ignore:`past_key_values` is deprecated:FutureWarning"
)  # Liger passes it
@KINDS
def test_ligers_layers(one_layer: Path, kinds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`use_liger_kernel=True` as TRL applies it, without its fused loss."""
    pytest.importorskip("liger_kernel")
    keep_transformers(monkeypatch)
    interpret(monkeypatch)
    arguments = {
        **SGD,
        "max_steps": 1,
        "num_iterations": 1,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "use_liger_kernel": True,
        "liger_kernel_config": {"rms_norm": False},
        **kinds[2],
    }
    ours = train(kinds[0], one_layer, **arguments)
    assert ours.args.liger_kernel_config["fused_linear_cross_entropy"] is False
    assert "LigerSwiGLU" in repr(ours.model)
    assert modeling_qwen3.apply_rotary_pos_emb.__module__.startswith("liger_kernel")
    theirs = train(kinds[1], one_layer, **arguments)
    assert moved(theirs, one_layer) > 1e-3
    assert_equal_runs(ours, theirs, kinds[3])


def test_a_checkpoint_knows_nothing_of_prefixtree(folder: Path, tmp_path: Path) -> None:
    """It loads with transformers alone, and training goes on from it as TRL's does."""
    arguments = {
        **SGD,
        "output_dir": str(tmp_path),
        "save_strategy": "steps",
        "save_steps": 2,
        "options": {"rollout_func": rollouts},
    }
    train(PrefixTreeGRPOTrainer, folder, **arguments)
    saved = tmp_path / "checkpoint-2"
    assert names_prefixtree(saved) == []
    assert AutoModelForCausalLM.from_pretrained(saved).config._attn_implementation == "sdpa"
    resumed = [make(trainer, folder, **arguments) for trainer in (PrefixTreeGRPOTrainer, SameOrder)]
    for trainer in resumed:
        trainer.train(resume_from_checkpoint=str(saved))
        assert trainer.state.global_step == 4
    assert_equal_runs(*resumed)


def test_the_same_model_generates(folder: Path) -> None:
    """Token by token what sdpa attention generates, in training mode as TRL calls it."""
    ours = make(PrefixTreeGRPOTrainer, folder, options={"reward_funcs": reward})
    theirs = make(GRPOTrainer, folder)
    chats = list(prompts()["prompt"]) * 2
    completions = []
    for trainer in (ours, theirs):
        trainer.model.train()
        torch.manual_seed(3)
        completions.append(trainer._generate(chats)[1])
    assert completions[0] == completions[1]
    assert ours.model.config._attn_implementation == "prefixtree"
    assert ours.ref_model.config._attn_implementation == "prefixtree"
    assert theirs.model.config._attn_implementation == "sdpa"
