"""Refusals of what is not verified, when the trainer is made or at the first batch."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState
from transformers import AutoConfig, AutoModelForCausalLM, Dots1Config, StableLmConfig
from trl import GRPOTrainer

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.trl import PrefixTreeGRPOTrainer, refusals
from prefixtree.integrations.trl.contract import IMAGE_PARAMETERS, check_grpo
from prefixtree.integrations.trl.sharding import keep_outputs
from tests.integrations.trl.runs import VOCABULARY, make, rollouts, tiny_config, tiny_mixture


def refused(folder: Path, message: str, **arguments: Any) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make(PrefixTreeGRPOTrainer, folder, **arguments)


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel=True: not verified with this trainer"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0: a shared token would draw one"),
        ({"torch_compile": True}, "torch_compile=True: not verified with this trainer"),
        ({"use_transformers_continuous_batching": True}, "it needs a paged attention"),
        ({"cache_implementation": "static"}, "'static': only the dynamic cache is verified"),
        (
            {"cast_lm_head_to_fp32": True},
            "cast_lm_head_to_fp32=True: under autocast the lm_head",
        ),
        ({"fp16": True}, "fp16=True: not verified with this trainer: use bf16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments(folder: Path, arguments: dict[str, Any], message: str) -> None:
    values = SimpleNamespace(**arguments)
    with pytest.raises(UnsupportedError, match=message):
        refusals.check_arguments(values)
    # TRL knows the argument, and not under a value that would be let through
    default = make(GRPOTrainer, folder, beta=0.0).args
    assert hasattr(default, next(iter(arguments)))
    refusals.check_arguments(default)


def test_the_trainer_asks(folder: Path) -> None:
    refused(folder, "cache_implementation='static'", cache_implementation="static")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("is_deepspeed_enabled", True, "DeepSpeed is not verified with this trainer"),
        (
            "accelerator",
            SimpleNamespace(parallelism_config=ParallelismConfig(tp_size=2)),
            "a parallelism_config with tensor, .*dp_shard_size may be any",
        ),
    ],
)
def test_ways_to_spread_a_model(folder: Path, name: str, value: Any, message: str) -> None:
    trainer = make(GRPOTrainer, folder, beta=0.0)
    refusals.check_distribution(trainer)
    assert hasattr(trainer, name)
    assert hasattr(trainer.accelerator, "parallelism_config")
    setattr(trainer, name, value)
    with pytest.raises(UnsupportedError, match=message):
        refusals.check_distribution(trainer)


FSDP = FullyShardedDataParallelPlugin


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fsdp_version": 1}, r"FSDP1 \(fsdp_version: 1\) .* set fsdp_version: 2"),
        ({"cpu_offload": True}, "set fsdp_offload_params: false"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_offload": True},
            "fsdp_activation_checkpointing_offload: true is not verified",
        ),
    ],
    ids=["FSDP1", "offload", "offloaded checkpoints"],
)
def test_ways_of_fsdp(
    folder: Path, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate's plugin; test_distributed.py has the runs with what is served."""
    refusals.check_fsdp(FSDP(fsdp_version=2))
    plugin = FSDP(**{"fsdp_version": 2, **settings})
    with pytest.raises(UnsupportedError, match=message):
        refusals.check_fsdp(plugin)
    # the trainer asks
    init = GRPOTrainer.__init__

    def sharded(self: GRPOTrainer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.is_fsdp_enabled = True
        self.accelerator.state.fsdp_plugin = plugin

    monkeypatch.setattr(GRPOTrainer, "__init__", sharded)
    refused(folder, message, beta=0.0)


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


def with_deepspeed(
    trainer: GRPOTrainer, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """Its plugin; test_deepspeed.py has real ones."""
    plugin = SimpleNamespace(deepspeed_config=config)
    monkeypatch.setattr(AcceleratorState, "deepspeed_plugin", plugin)
    trainer.is_deepspeed_enabled = True
    return plugin


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hybrid_engine": {"enabled": True}}, "'hybrid_engine' of the DeepSpeed config"),
        ({"tensor_parallel": {"autotp_size": 2}}, "'tensor_parallel' of the DeepSpeed config"),
        ({"sequence_parallel_size": 2}, "'sequence_parallel_size' of the DeepSpeed config"),
        ({"torch_autocast": {"enabled": True}}, "'torch_autocast' of the DeepSpeed config"),
        ({"compile": {"deepcompile": True}}, "'compile' of the DeepSpeed config"),
        ({"fp16": {"enabled": True}}, "'fp16' of the DeepSpeed config"),
        ({"data_types": {"param_dtype": "fp16"}}, "'data_types' of the DeepSpeed config"),
        ({"what is new": 1}, "'what is new' of the DeepSpeed config is not verified"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights=True"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow={'topk_ratio': 0.1}"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "offload_param to 'nvme' is not verified under TRL, expected 'cpu' or 'none'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_deepspeed_configurations(
    folder: Path, config: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": True},
        "hybrid_engine": {"enabled": False},
        "compile": {},
        "gradient_clipping": "auto",
    }
    trainer = make(GRPOTrainer, folder, beta=0.0)
    plugin = with_deepspeed(trainer, fine, monkeypatch)
    refusals.check_distribution(trainer, deepspeed=True)
    plugin.deepspeed_config = {**fine, **config}
    with pytest.raises(UnsupportedError, match=message):
        refusals.check_distribution(trainer, deepspeed=True)


@pytest.mark.parametrize("name", ["use_liger_kernel", "torch_compile", "fp16"])
def test_what_is_not_verified_under_deepspeed(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(GRPOTrainer, folder, beta=0.0)
    with_deepspeed(trainer, {}, monkeypatch)
    setattr(trainer.args, name, True)
    with pytest.raises(UnsupportedError, match=f"{name}=True is not verified under DeepSpeed"):
        refusals.check_distribution(trainer, deepspeed=True)


def test_recomputation_beside_deepspeed_and_compiled_models(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(GRPOTrainer, folder, beta=0.0)
    assert refusals.check_recompute(trainer, "auto") == "auto"
    trainer.args.torch_compile = True
    assert refusals.check_recompute(trainer, None) is None
    with pytest.raises(UnsupportedError, match=r"recompute='all' with torch_compile .*anew"):
        refusals.check_recompute(trainer, "all")
    with_deepspeed(trainer, {}, monkeypatch)
    with pytest.raises(UnsupportedError, match="recompute='auto' is not verified under DeepSpeed"):
        refusals.check_recompute(trainer, "auto")


def test_ligers_layers_of_another_family(folder: Path) -> None:
    """Of gpt2, which is on the list of models."""
    model = model_of(AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=260))
    message = "use_liger_kernel=True: Liger's layers were not compared in gpt2, only in deepseek_v2"
    refused(folder, message, model=model, beta=0.0, use_liger_kernel=True, disable_dropout=True)


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


def test_experts_and_their_loss(folder: Path) -> None:
    """Refused where transformers computes none, whatever TRL multiplies it by."""
    sizes = tiny_mixture().to_dict()
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "moe_intermediate_size")
    config = Dots1Config(
        **{name: sizes[name] for name in names}, n_routed_experts=4, n_shared_experts=1
    )
    message = r"Dots1ForCausalLM .* no load-balancing loss.*set router_aux_loss_coef=0\.0"
    refused(folder, message, model=model_of(config), beta=0.0, router_aux_loss_coef=0.1)


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
    refused(folder, "pictures are not verified in model type 'qwen3'", beta=0.0)


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

    check_grpo(GRPOTrainer)
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", changed)
    refused(
        folder,
        r"changed the parameters of GRPOTrainer._get_per_token_logps_and_entropies "
        r"\(new news; gone logits_to_keep, .*tested with TRL 1.15.0 to 1.16.0",
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
