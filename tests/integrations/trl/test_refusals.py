"""Refusals of what is not verified, when the trainer is made or at the first batch."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, Dots1Config, StableLmConfig
from trl import GRPOTrainer

from prefixtree.errors import UnsupportedError, refuse
from prefixtree.integrations.trl import (
    PrefixTreeGRPOTrainer,
    PrefixTreeKTOTrainer,
    PrefixTreeRewardTrainer,
    PrefixTreeSFTTrainer,
    refusals,
    tree_rollouts,
)
from prefixtree.integrations.trl.contract import IMAGE_PARAMETERS, check_trainer
from prefixtree.integrations.trl.distillation import (
    PrefixTreeDistillationTrainer,
    PrefixTreeGKDTrainer,
    PrefixTreeGOLDTrainer,
)
from prefixtree.integrations.trl.sharding import keep_outputs
from tests.integrations.trl.distillation_runs import make_distillation, make_gkd, make_gold
from tests.integrations.trl.runs import VOCABULARY, make, rollouts, tiny_config, tiny_mixture
from tests.integrations.trl.sample_runs import make_sft
from tests.support.refusals import check_cases, pattern, rows_of


def refused(folder: Path, message: str, **arguments: Any) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make(PrefixTreeGRPOTrainer, folder, **arguments)


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


# ---- every row of the tables ---------------------------------------------------------------------


class Run:
    """TRL's own trainer, of which a case changes what is refused, until its test ends."""

    def __init__(self, folder: Path, stock: GRPOTrainer, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.stock, self._patch = folder, stock, patch

    def set(self, **values: Any) -> Any:
        """The trainer, with these attributes."""
        for name, value in values.items():
            assert hasattr(self.stock, name)
            self._patch.setattr(self.stock, name, value)
        return self.stock

    def set_arguments(self, **values: Any) -> Any:
        """The trainer, with these arguments, which TRL knows."""
        for name, value in values.items():
            assert hasattr(self.stock.args, name)
            self._patch.setattr(self.stock.args, name, value)
        return self.stock

    def of_newer_trl(self, **values: Any) -> Any:
        """The trainer, with these arguments, in a TRL that the tests did not run with."""
        self._patch.setattr(trl, "__version__", "1.99.0")
        return self.set_arguments(**values)

    def set_type(self, model_type: str) -> Any:
        self._patch.setattr(self.stock.model.config, "model_type", model_type)
        return self.stock

    def with_deepspeed(self, config: dict[str, Any]) -> Any:
        """Its plugin; test_deepspeed.py has real ones."""
        plugin = SimpleNamespace(deepspeed_config=config)
        self._patch.setattr(AcceleratorState, "deepspeed_plugin", plugin)
        return self.set(is_deepspeed_enabled=True)

    def with_fsdp(self, **settings: Any) -> Any:
        """accelerate's plugin; test_distributed.py has the runs with what is served."""
        plugin = FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **settings})
        self._patch.setattr(self.stock.accelerator.state, "fsdp_plugin", plugin, raising=False)
        return self.set(is_fsdp_enabled=True)


@pytest.fixture(scope="module")
def trls(folder: Path) -> GRPOTrainer:
    return make(GRPOTrainer, folder, beta=0.0)


@pytest.fixture
def run(folder: Path, trls: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(folder, trls, monkeypatch)


Case = Callable[[Run], Any]


def with_argument(**given: Any) -> Case:
    return lambda run: refusals.check_arguments(run.set_arguments(**given).args)


def with_deepspeed(**config: Any) -> Case:
    return lambda run: refusals.check_distribution(run.with_deepspeed(config))


def with_fsdp(**settings: Any) -> Case:
    return lambda run: refusals.check_distribution(run.with_fsdp(**settings))


def sft(**arguments: Any) -> Case:
    return lambda run: make_sft(PrefixTreeSFTTrainer, run.folder, **arguments)


def gkd(**arguments: Any) -> Case:
    return lambda run: make_gkd(PrefixTreeGKDTrainer, run.folder, max_length=None, **arguments)


def sampling(**changes: Any) -> Case:
    return lambda run: tree_rollouts([], run.set_arguments(**changes))


CASES: dict[str, tuple[Case, ...]] = {
    "ARGUMENTS: neftune_noise_alpha": (with_argument(neftune_noise_alpha=5.0),),
    "ARGUMENTS: use_transformers_continuous_batching": (
        with_argument(use_transformers_continuous_batching=True),
    ),
    "ARGUMENTS: cache_implementation": (with_argument(cache_implementation="static"),),
    "ALONE: activation_offloading": (
        lambda run: refusals.check_arguments(SimpleNamespace(activation_offloading=True)),
    ),
    **{
        f"ALONE: {name}": (
            with_argument(**{name: True}),
            lambda run, name=name: refusals.check_distribution(
                run.set_arguments(**{name: True}) and run.with_deepspeed({})
            ),
            lambda run, name=name: refusals.check_distribution(
                run.set_arguments(**{name: True}) and run.with_fsdp()
            ),
        )
        for name in ("use_liger_kernel", "torch_compile", "fp16", "cast_lm_head_to_fp32")
    },
    "DISTRIBUTIONS: parallelism_config": (
        lambda run: refusals.check_distribution(
            run.set(accelerator=SimpleNamespace(parallelism_config=ParallelismConfig(tp_size=2)))
        ),
    ),
    "DEEPSPEED_CONFIG: another section": (
        with_deepspeed(hybrid_engine={"enabled": True}),
        with_deepspeed(tensor_parallel={"autotp_size": 2}),
        with_deepspeed(sequence_parallel_size=2),
        with_deepspeed(torch_autocast={"enabled": True}),
        with_deepspeed(compile={"deepcompile": True}),
        with_deepspeed(fp16={"enabled": True}),
        with_deepspeed(data_types={"param_dtype": "fp16"}),
        with_deepspeed(what_is_new=1),
    ),
    "DEEPSPEED_CONFIG: zero_quantized, zenflow": (
        with_deepspeed(zero_optimization={"zero_quantized_weights": True}),
        with_deepspeed(zero_optimization={"zero_quantized_nontrainable_weights": True}),
        with_deepspeed(zero_optimization={"zero_quantized_gradients": True}),
        with_deepspeed(zero_optimization={"zenflow": {"topk_ratio": 0.1}}),
    ),
    "DEEPSPEED_CONFIG: offload_param, offload_optimizer": (
        with_deepspeed(zero_optimization={"offload_param": {"device": "nvme"}}),
        with_deepspeed(zero_optimization={"offload_optimizer": {"device": "nvme"}}),
    ),
    "FSDP: fsdp_version": (with_fsdp(fsdp_version=1),),
    "FSDP: fsdp_offload_params": (with_fsdp(cpu_offload=True),),
    "FSDP: fsdp_activation_checkpointing_offload": (
        with_fsdp(activation_checkpointing=True, activation_checkpointing_offload=True),
    ),
    "IMAGES: images of other families": (lambda run: refusals.check_images(run.set_type("glm4v")),),
    "IMAGES: images under DeepSpeed or FSDP": (
        lambda run: refusals.check_images(
            run.set_type("qwen3_vl") and run.set(is_deepspeed_enabled=True)
        ),
        lambda run: refusals.check_images(
            run.set_type("qwen3_vl") and run.set(is_fsdp_enabled=True)
        ),
    ),
    "FAMILIES: use_liger_kernel": (
        lambda run: refuse(
            refusals.FAMILIES, run.set_arguments(use_liger_kernel=True) and run.set_type("gpt2")
        ),
    ),
    "FAMILIES: router_aux_loss_coef": (lambda run: without_aux_loss(run.folder),),
    "ATTENTION: attn_implementation": (lambda run: refusals.check_attention(run.stock.model),),
    "DROPOUT: dropout": (lambda run: refusals.check_model(dropping()),),
    "RECOMPUTED: recompute under DeepSpeed": (
        lambda run: refusals.check_recompute(run.set(is_deepspeed_enabled=True), "auto"),
    ),
    "RECOMPUTED: recompute with torch_compile": (
        lambda run: refusals.check_recompute(run.set_arguments(torch_compile=True), "all"),
    ),
    # test_switches.py has the trainers
    "MEASURED: recompute='auto' with activation_offloading": (
        lambda run: refusals.check_recompute(
            SimpleNamespace(args=SimpleNamespace(activation_offloading=True)), "auto"
        ),
    ),
    "JOINED: packing": (gkd(packing=True, packing_strategy="wrapped"), gkd(eval_packing=True)),
    "SFT: padding_free with images": (
        lambda run: refuse(refusals.SFT, SimpleNamespace(padding_free=True, _is_vlm=True)),
    ),
    "SFT: padding_free with compute_metrics": (
        sft(packing=True, options={"compute_metrics": lambda prediction: {}}),
        sft(padding_free=True, max_length=None, options={"compute_metrics": lambda p: {}}),
    ),
    "SFT: compute_loss_func": (
        sft(options={"compute_loss_func": lambda *args, **kwargs: torch.zeros(())}),
    ),
    "SFT: label_smoothing_factor": (sft(label_smoothing_factor=0.1),),
    "REWARDS: fused_linear_cross_entropy": (
        lambda run: refuse(
            PrefixTreeRewardTrainer.refused, run.set_arguments(use_liger_kernel=True)
        ),
    ),
    "ANSWERS: use_uld_loss": (
        lambda run: make_gold(
            PrefixTreeGOLDTrainer,
            run.folder,
            use_uld_loss=True,
            teacher_tokenizer_name_or_path=str(run.folder),
        ),
    ),
    "ANSWERS: compute_metrics": (
        lambda run: make_gkd(
            PrefixTreeGKDTrainer, run.folder, options={"compute_metrics": lambda prediction: {}}
        ),
    ),
    "TEXT: images": (
        lambda run: refuse(refusals.DISTILLATION, SimpleNamespace(_is_vlm=True)),
        lambda run: refuse(PrefixTreeKTOTrainer.refused, SimpleNamespace(_is_vlm=True)),
    ),
    "DISTILLATION: teacher_model": (
        lambda run: make_distillation(
            PrefixTreeDistillationTrainer, run.folder, options={"teacher_model": None}
        ),
    ),
    "ROLLOUTS: vision model": (lambda run: sees_under_fsdp(run),),
    "ROLLOUTS: repetition_penalty": (sampling(repetition_penalty=1.1),),
    "ROLLOUTS: generation_kwargs": (sampling(generation_kwargs={"num_beams": 2}),),
    "ROLLOUTS: tools": (lambda run: tree_rollouts([], run.set(tools=[print])),),
    # test_async.py has the trainer itself, of the versions of TRL that have it
    "GRPO: top_k, top_p, min_p": tuple(
        lambda run, given=given: refuse(refusals.GRPO, run.of_newer_trl(use_vllm=True, **given))
        for given in ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1})
    ),
    "ASYNC_GRPO: DeepSpeed": (
        lambda run: refuse(refusals.ASYNC_GRPO, SimpleNamespace(is_deepspeed_enabled=True)),
    ),
    "ASYNC_GRPO: FSDP": (
        lambda run: refuse(refusals.ASYNC_GRPO, SimpleNamespace(is_fsdp_enabled=True)),
    ),
    "ASYNC_GRPO: router_aux_loss_coef": (
        lambda run: refuse(refusals.ASYNC_GRPO, SimpleNamespace(aux_loss_enabled=True)),
    ),
}
ROWS = rows_of(refusals)


def without_aux_loss(folder: Path) -> None:
    """Refused where transformers computes none, whatever TRL multiplies it by."""
    sizes = tiny_mixture().to_dict()
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "moe_intermediate_size")
    config = Dots1Config(
        **{name: sizes[name] for name in names}, n_routed_experts=4, n_shared_experts=1
    )
    model = model_of(config)
    make(PrefixTreeGRPOTrainer, folder, model=model, beta=0.0, router_aux_loss_coef=0.1)


def dropping() -> Any:
    model = model_of(tiny_config())
    model.model.layers[0].mlp.dropout = torch.nn.Dropout(0.1)
    return model.eval()


def sees_under_fsdp(run: Run) -> None:
    trainer = run.with_fsdp()
    run._patch.setattr(trainer.model.config, "vision_config", object(), raising=False)
    tree_rollouts([], trainer)


def test_every_row_has_a_case() -> None:
    check_cases(ROWS, CASES)


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in ROWS for case in CASES.get(name, (None,))]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows(name: str, case: Case, run: Run) -> None:
    with pytest.raises(UnsupportedError, match=pattern(ROWS[name])):
        case(run)


def test_what_is_served(run: Run) -> None:
    trainer = run.stock
    refusals.check_arguments(trainer.args)
    refusals.check_distribution(trainer)
    refusals.check_distribution(run.with_fsdp())
    assert refusals.check_recompute(trainer, "auto") == "auto"
    fine = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": True},
        "hybrid_engine": {"enabled": False},
        "compile": {},
        "gradient_clipping": "auto",
    }
    run.set(is_fsdp_enabled=False)
    refusals.check_distribution(run.with_deepspeed(fine))
    refuse(refusals.GRPO, run.set_arguments(use_vllm=True, top_p=0.9))
    refuse(refusals.GRPO, run.of_newer_trl(top_p=1.0))
    run.set_arguments(torch_compile=True)
    assert refusals.check_recompute(trainer, None) is None


def test_the_trainer_asks(folder: Path) -> None:
    refused(folder, "cache_implementation='static'", cache_implementation="static")


FSDP = FullyShardedDataParallelPlugin


def test_the_trainer_asks_for_its_distribution(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = GRPOTrainer.__init__

    def sharded(self: GRPOTrainer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.is_fsdp_enabled = True
        self.accelerator.state.fsdp_plugin = FSDP(fsdp_version=1)

    monkeypatch.setattr(GRPOTrainer, "__init__", sharded)
    refused(folder, r"FSDP1 \(fsdp_version: 1\) .* set fsdp_version: 2", beta=0.0)


def test_what_mixed_precision_casts() -> None:
    """Of FSDP2's outputs nothing: log-probabilities stay in float32."""
    plugin = FSDP(fsdp_version=2)
    keep_outputs(plugin)
    assert plugin.mixed_precision_policy is None
    plugin.set_mixed_precision("bf16")
    before = plugin.mixed_precision_policy
    assert before.output_dtype == torch.bfloat16
    keep_outputs(plugin)
    assert plugin.mixed_precision_policy == dataclasses.replace(before, output_dtype=None)
    old = FSDP(fsdp_version=1)
    old.set_mixed_precision("bf16")
    keep_outputs(old)  # is refused later, with a reason


def test_model_types_outside_the_allow_list(folder: Path) -> None:
    """StableLM drops the mask's keyword, and would train on a plain causal mask."""
    config = StableLmConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    refused(folder, "model type 'stablelm' is not served", model=model_of(config), beta=0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, "config.attention_dropout is 0.1"),
    ],
    ids=["dropout"],
)
def test_configurations(folder: Path, changes: dict[str, Any], message: str) -> None:
    refused(folder, message, model=model_of(tiny_config(**changes)), beta=0.0)


@pytest.mark.parametrize("name", IMAGE_PARAMETERS)
def test_images(folder: Path, name: str) -> None:
    made = make(PrefixTreeGRPOTrainer, folder, beta=0.0)
    batch = {"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.ones(1, 4).long()}
    with pytest.raises(UnsupportedError, match=f"the batch has {name}: the trainer has no proc"):
        made._get_per_token_logps_and_entropies(
            made.model, **batch, logits_to_keep=2, **{name: torch.ones(1)}
        )


def test_a_processor_of_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer that TRL makes with one."""
    init = GRPOTrainer.__init__

    def changed(self: GRPOTrainer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._is_vlm = True

    monkeypatch.setattr(GRPOTrainer, "__init__", changed)
    refused(folder, "images are not verified in model type 'qwen3'", beta=0.0)


def test_adapters(folder: Path) -> None:
    peft = pytest.importorskip("peft")

    def with_adapter(config: Any) -> dict[str, Any]:
        return {"options": {"peft_config": config}, "beta": 0.0}

    targets = ["q_proj", "v_proj"]
    dropout = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.1)
    refused(folder, r"lora_dropout.*is a dropout \(p = 0.1\)", **with_adapter(dropout))
    make(PrefixTreeGRPOTrainer, folder, **with_adapter(dropout), disable_dropout=True)
    activated = peft.LoraConfig(
        r=4, target_modules=targets, task_type="CAUSAL_LM", alora_invocation_tokens=[1, 2]
    )
    refused(
        folder, "'default' is the LoRA variant alora_invocation_tokens", **with_adapter(activated)
    )
    lily = peft.LilyConfig(target_modules=targets)
    refused(folder, "PEFT method LILY of adapter 'default'", **with_adapter(lily))
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    refused(folder, "PEFT method PROMPT_TUNING", **with_adapter(prompt))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "hf_quantizer",
            SimpleNamespace(quantization_config=SimpleNamespace(quant_method="gptq")),
            "that transformers loads quantised",
        ),
        ("_use_kernels", True, "use_kernels replaces layers"),
    ],
)
def test_weights_and_layers(name: str, value: Any, message: str) -> None:
    model = model_of(tiny_config())
    refusals.check_model(model)
    vars(model)[name] = value
    with pytest.raises(UnsupportedError, match=message):
        refusals.check_model(model)


def test_a_dropout_that_appears_later_is_still_seen(folder: Path) -> None:
    """At the first batch, by what scores it."""
    made = make(PrefixTreeGRPOTrainer, folder, options={"rollout_func": rollouts}, beta=0.0)
    made.model.model.layers[0].mlp.act_fn = torch.nn.Sequential(
        made.model.model.layers[0].mlp.act_fn, torch.nn.Dropout(0.1)
    )
    with pytest.raises(UnsupportedError, match="is an active dropout"):
        made.train()


def test_another_signature(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that hands the forward something new must not be served as if it had not."""

    def changed(self: Any, model: Any, input_ids: Any, attention_mask: Any, news: Any) -> None: ...

    check_trainer(GRPOTrainer)
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", changed)
    refused(
        folder,
        r"changed the parameters of GRPOTrainer._get_per_token_logps_and_entropies "
        r"\(new news; gone logits_to_keep, .*with TRL 1.15.0 to 1.16.0: pip install 'trl==1.16.0'",
    )
    monkeypatch.delattr(GRPOTrainer, "_get_per_token_logps_and_entropies")
    refused(folder, "has no GRPOTrainer._get_per_token_logps_and_entropies")


def test_a_version_that_was_not_tested(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signatures may be the same and mean something else."""
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    with pytest.warns(UserWarning, match=r"tested with TRL 1\.15.* make test-trl TRL=1\.99\.0$"):
        make(PrefixTreeGRPOTrainer, folder, beta=0.0)


def test_a_version_that_is_too_old(tmp_path: Path) -> None:
    """Before anything is imported that it has not."""
    (tmp_path / "trl.py").write_text("__version__ = '1.14.2'")
    run = subprocess.run(
        [sys.executable, "-c", "import prefixtree.integrations.trl.distillation"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert "UnsupportedError: prefixtree.integrations.trl needs TRL 1.15.0 or newer" in last
    assert "this is TRL 1.14.2: pip install 'trl==1.16.0'" in last


@pytest.mark.parametrize("name", ["sdpa", "prefixtree", None])
def test_an_attention_that_is_overridden(folder: Path, name: str | None) -> None:
    given = {"model_init_kwargs": {"attn_implementation": name}} if name else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # TRL loads it with the arguments
        made = make(PrefixTreeGRPOTrainer, folder, model=str(folder), beta=0.0, **given)
    assert made.model.config._attn_implementation == "prefixtree"
    found = [w for w in caught if "is not used: packed rows need 'prefixtree'" in str(w.message)]
    assert len(found) == (name == "sdpa")
    assert all("model_init_kwargs={'attn_implementation': 'sdpa'}" in str(w) for w in found)
    assert all(Path(w.filename).name == "runs.py" for w in found)


def test_the_attention_stays_refused_where_it_is_taken_away(folder: Path) -> None:
    made = make(PrefixTreeGRPOTrainer, folder, options={"rollout_func": rollouts})
    for model, rest in ((made.model, made.ref_model), (made.ref_model, made.model)):
        rest.set_attn_implementation("prefixtree")
        model.set_attn_implementation("sdpa")
        with pytest.raises(UnsupportedError, match=r"'sdpa', .* the trainer set .prefixtree. when"):
            made.train()
