"""The parts of verl that the adapter relies on. A version that changes any fails here, by name.

Signatures and settings are compared, and the source of what the engines replace: when verl changes
that, the change must be read and, where it matters, made here too. Then the digest is renewed (the
failing test prints it) and `integrations/verl/version.py` widened.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import textwrap
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
import verl
from transformers import Qwen3Config
from verl.trainer.ppo import padding_utils, ray_trainer
from verl.trainer.ppo.v1 import trainer_base
from verl.utils import fsdp_utils, model, seqlen_balancing
from verl.utils import tensordict_utils as tu
from verl.utils.flops_counter import FlopsCounter
from verl.utils.metric import Metric
from verl.workers import engine_workers
from verl.workers.config import FSDPEngineConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine import utils as engine_utils
from verl.workers.engine.fsdp.transformer_impl import (
    FSDPEngine,
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils import losses, padding

import prefixtree.integrations.verl as adapter


def digest(function: Callable[..., Any]) -> str:
    """Of a function's code: comments, docstring and formatting do not count."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body = node.body[1:]
    # not ast.dump, which Python versions write differently
    parts = []
    for node in ast.walk(tree):
        parts.append(type(node).__name__)
        values = (v for _, v in ast.iter_fields(node) if not isinstance(v, (ast.AST, list)))
        parts += [repr(value) for value in values if value is not None]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


# what is replaced (it must be followed) or built on (its results are taken as they are)
SOURCES: dict[str, tuple[Callable[..., Any], str, str]] = {
    # replaced
    "FSDPEngine.forward_backward_batch": (
        FSDPEngine.forward_backward_batch,
        "c255afee553b",
        "engine.py",
    ),
    "FSDPEngineWithLMHead.forward_step": (
        FSDPEngineWithLMHead.forward_step,
        "362132892297",
        "engine.py",
    ),
    "FSDPEngineWithLMHead.prepare_model_inputs": (
        FSDPEngineWithLMHead.prepare_model_inputs,
        "a082b18fac31",
        "refusals.py and engine.py",
    ),
    "FSDPEngineWithLMHead.prepare_model_outputs": (
        FSDPEngineWithLMHead.prepare_model_outputs,
        "e2de8e556ba3",
        "refusals.py and engine.py",
    ),
    "FSDPEngineWithValueHead.prepare_model_outputs": (
        FSDPEngineWithValueHead.prepare_model_outputs,
        "9af41a3b0759",
        "PackedCriticEngine",
    ),
    "FSDPEngine._build_module": (FSDPEngine._build_module, "c2ead7bea647", "PackedCriticEngine"),
    "load_valuehead_model": (model.load_valuehead_model, "2125c8b3681d", "PackedCriticEngine"),
    "prepare_micro_batches": (engine_utils.prepare_micro_batches, "04b676ddf366", "batches.py"),
    "PPOTrainer._balance_batch": (
        trainer_base.PPOTrainer._balance_batch,
        "2e66f4164b68",
        "trainer.py",
    ),
    # built on
    "BaseEngine.train_batch": (FSDPEngine.train_batch, "fef9f136c6a0", "engine.py"),
    "BaseEngine.infer_batch": (FSDPEngine.infer_batch, "d4c90ed1f8aa", "engine.py"),
    "FSDPEngine._gradient_sync_context": (
        FSDPEngine._gradient_sync_context,
        "50bfdc6c0d75",
        "engine.py",
    ),
    "FSDPEngine._build_fsdp_module": (FSDPEngine._build_fsdp_module, "8e510619444b", "engine.py"),
    "FSDPEngine._init_device_mesh": (FSDPEngine._init_device_mesh, "8423b3568186", "engine.py"),
    "FSDPEngine.get_data_parallel_group": (
        FSDPEngine.get_data_parallel_group,
        "4910dd51d20b",
        "engine.py",
    ),
    "FSDPEngine.is_mp_src_rank_with_outputs": (
        FSDPEngine.is_mp_src_rank_with_outputs,
        "5f5f4ce39c00",
        "engine.py",
    ),
    "EngineRegistry.get_engine_cls": (EngineRegistry.get_engine_cls, "7eb4fb33e468", "engine.py"),
    "postprocess_batch_func": (engine_utils.postprocess_batch_func, "f466530f3236", "engine.py"),
    "restore_dynamic_batch": (seqlen_balancing.restore_dynamic_batch, "7e60692a3e9f", "engine.py"),
    "TrainingWorker.train_mini_batch": (
        TrainingWorker.train_mini_batch,
        "b905b3f14d0b",
        "balance.py",
    ),
    "TrainingWorker.train_batch": (TrainingWorker.train_batch, "4f62ebfa742a", "engine.py"),
    "TrainingWorker.infer_batch": (TrainingWorker.infer_batch, "a55032bfabab", "engine.py"),
    "TrainingWorker._postprocess_output": (
        TrainingWorker._postprocess_output,
        "7dab22b0efce",
        "metrics.py",
    ),
    "Metric.aggregate_dp": (Metric.aggregate_dp, "90fb16b64185", "at_least"),
    "no_padding_2_padding": (padding.no_padding_2_padding, "5321fcded910", "shifted_to_jagged"),
    "response_from_nested": (padding.response_from_nested, "2bdd64e6ac18", "shifted_to_jagged"),
    "ppo_loss": (losses.ppo_loss, "85361c85edc2", "scored_tokens"),
    "value_loss": (losses.value_loss, "4495fd3ccba6", "PackedCriticEngine"),
    "upsample_batch_to_divisible_size": (
        padding_utils.upsample_batch_to_divisible_size,
        "7d09d900d8b1",
        "trainer.py",
    ),
    "PPOTrainer.__init__": (trainer_base.PPOTrainer.__init__, "3d01ba3f939d", "trainer.py"),
    "PPOTrainer._step_once": (trainer_base.PPOTrainer._step_once, "5611ea6a818a", "trainer.py"),
    "HFModelConfig.__post_init__": (HFModelConfig.__post_init__, "2fe6235e0f28", "engine.py"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_source_is_what_was_read(name: str) -> None:
    function, known, ours = SOURCES[name]
    now = digest(function)
    assert now == known, (
        f"verl {verl.__version__} changed {name}, which {ours} follows: read what changed, bring "
        f"that up to it, run this suite, and set the digest to {now!r}"
    )


def test_comments_do_not_count_and_code_does() -> None:
    def make(body: str) -> Callable[..., Any]:
        # inspect finds the source of functions in modules that have a loader or a cached source
        name = f"<made {hashlib.sha256(body.encode()).hexdigest()}>"
        code = f"def function(x):\n{textwrap.indent(body, '    ')}\n"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        namespace: dict[str, Any] = {}
        exec(compile(code, name, "exec"), namespace)
        return namespace["function"]

    plain = digest(make("return x + 1"))
    assert digest(make('"""Words."""\n# more\nreturn (x +\n    1)')) == plain
    assert digest(make("return x + 2")) != plain


# ---- signatures ----------------------------------------------------------------------------------

SIGNATURES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "FSDPEngine.__init__": (
        FSDPEngine.__init__,
        ["self", "model_config", "engine_config", "optimizer_config", "checkpoint_config"],
    ),
    "FSDPEngine.forward_backward_batch": (
        FSDPEngine.forward_backward_batch,
        ["self", "data", "loss_function", "forward_only"],
    ),
    "FSDPEngineWithLMHead.forward_step": (
        FSDPEngineWithLMHead.forward_step,
        ["self", "micro_batch", "loss_function", "forward_only"],
    ),
    "FSDPEngine.train_batch": (FSDPEngine.train_batch, ["self", "data", "loss_function"]),
    "FSDPEngine.infer_batch": (FSDPEngine.infer_batch, ["self", "data", "loss_function"]),
    "FSDPEngine._gradient_sync_context": (
        FSDPEngine._gradient_sync_context,
        ["self", "is_last_micro_batch"],
    ),
    "EngineRegistry.register": (
        EngineRegistry.register,
        ["model_type", "backend", "device", "vendor"],
    ),
    "postprocess_batch_func": (
        engine_utils.postprocess_batch_func,
        ["output_lst", "indices", "data"],
    ),
    "index_select_tensor_dict": (tu.index_select_tensor_dict, ["batch", "indices"]),
    "get_non_tensor_data": (tu.get_non_tensor_data, ["data", "key", "default"]),
    "get_tensordict": (tu.get_tensordict, ["tensor_dict", "non_tensor_dict"]),
    "get_init_weight_context_manager": (
        fsdp_utils.get_init_weight_context_manager,
        ["use_meta_tensor", "mesh"],
    ),
    "extract_multi_modal_inputs": (model.extract_multi_modal_inputs, ["batch_data", "indices"]),
    "log_seqlen_unbalance": (
        seqlen_balancing.log_seqlen_unbalance,
        ["seqlen_list", "partitions", "prefix"],
    ),
    "PPOTrainer._balance_batch": (
        trainer_base.PPOTrainer._balance_batch,
        ["self", "batch", "metrics", "logging_prefix", "keep_minibatch"],
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters(name: str) -> None:
    function, expected = SIGNATURES[name]
    found = list(inspect.signature(function).parameters)
    assert found == expected, f"verl {verl.__version__}: {name} takes {found}, not {expected}"


# ---- settings ------------------------------------------------------------------------------------

ENGINE_SETTINGS = {
    "_target_",
    "dtype",
    "entropy_checkpointing",
    "entropy_from_logits_chunk_size",
    "entropy_from_logits_with_chunking",
    "forward_only",
    "forward_prefetch",
    "fsdp_size",
    "full_determinism",
    "infer_max_token_len_per_gpu",
    "infer_micro_batch_size_per_gpu",
    "max_token_len_per_gpu",
    "micro_batch_size_per_gpu",
    "mixed_precision",
    "model_dtype",
    "offload_policy",
    "optimizer_offload",
    "pad_to_length",
    "pad_to_length_bucket",
    "param_offload",
    "qat",
    "reshard_after_forward",
    "router_replay",
    "seed",
    "strategy",
    "turbo_config",
    "ulysses_sequence_parallel_size",
    "use_dynamic_bsz",
    "use_fused_kernels",
    "use_no_sync_for_gradient_accumulation",
    "use_orig_params",
    "use_remove_padding",
    "use_torch_compile",
    "wrap_policy",
}
MODEL_SETTINGS = {
    "_target_",
    "architectures",
    "custom_chat_template",
    "enable_activation_offload",
    "enable_gradient_checkpointing",
    "exclude_modules",
    "external_lib",
    "fused_kernel_options",
    "generation_config",
    "hf_config",
    "hf_config_path",
    "load_tokenizer",
    "local_hf_config_path",
    "local_path",
    "local_tokenizer_path",
    "lora",
    "lora_adapter_path",
    "lora_alpha",
    "lora_rank",
    "model_type",
    "mtp",
    "override_config",
    "path",
    "processor",
    "target_modules",
    "target_parameters",
    "tiled_mlp",
    "tokenizer",
    "tokenizer_path",
    "trust_remote_code",
    "use_fused_kernels",
    "use_liger",
    "use_remove_padding",
    "use_shm",
}


@pytest.mark.parametrize(
    ("config", "known"), [(FSDPEngineConfig, ENGINE_SETTINGS), (HFModelConfig, MODEL_SETTINGS)]
)
def test_every_setting_is_known(config: Any, known: set[str]) -> None:
    found = {field.name for field in fields(config)}
    assert found == known, (
        f"verl {verl.__version__}: {config.__name__} has new settings {sorted(found - known)} and "
        f"lost {sorted(known - found)}: decide in integrations/verl/refusals.py whether packed "
        "forests run under them, then list them here"
    )


# ---- behaviour -----------------------------------------------------------------------------------


def test_an_engine_with_a_vendor_precedes_verls_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for model_type, ours in (
        ("language_model", adapter.PackedActorEngine),
        ("value_model", adapter.PackedCriticEngine),
    ):
        for backend in ("fsdp", "fsdp2"):
            monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
            monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
            assert EngineRegistry.get_engine_cls(model_type, backend) is ours
            # and what is not verified is left alone
            for device, vendor in (("cuda", "amd"), ("npu", "huawei")):
                monkeypatch.setenv("VERL_ENGINE_DEVICE", device)
                monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)
                stock = EngineRegistry.get_engine_cls(model_type, backend)
                assert not stock.__module__.startswith("prefixtree")


def test_engines_have_the_attributes_that_are_read() -> None:
    source = inspect.getsource(FSDPEngine)
    for name in (
        "self._autocast_dtype",
        "self.scaler",
        "self.pad_to_length",
        "self.pad_to_length_bucket",
        "self.module",
        "self.device_mesh",
        "self.model_config",
        "self.engine_config",
        "self.ulysses_sequence_parallel_size",
        "self.ulysses_parallel_group",
    ):
        assert name in source, f"verl {verl.__version__}: FSDPEngine has no {name}"


@pytest.mark.parametrize(
    ("where", "loss"),
    [
        (engine_workers, "ppo_loss"),
        (engine_workers, "distillation_ppo_loss"),
        (trainer_base, "value_loss"),
        (ray_trainer, "value_loss"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_losses_come_with_their_configuration(where: Any, loss: str) -> None:
    """As a keyword of a partial, where what depends on micro-batches is looked for."""
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(where)))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("partial")
    ]
    made = [call for call in calls if call.args and ast.unparse(call.args[0]) == loss]
    assert made and all("config" in [k.arg for k in call.keywords] for call in made)


def test_workload_is_a_polynomial_without_a_constant() -> None:
    # so that the cost of tokens from depth d on is workload(n) - workload(d)
    n = torch.tensor([0, 1, 10, 1000])
    found = seqlen_balancing.calculate_workload(n)
    a = found[1] - 1
    assert torch.equal(found, a * n + n * n)


def test_flops_are_a_polynomial_of_the_lengths() -> None:
    counter = FlopsCounter(Qwen3Config())
    one, both = (counter.estimate_flops(n, 1.0)[0] for n in ([100], [100, 50]))
    assert both == pytest.approx(one + counter.estimate_flops([50], 1.0)[0])
    assert np.isclose(counter.estimate_flops([100], 2.0)[0], one / 2)
