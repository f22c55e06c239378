"""Everything in TRL that the adapter relies on. Where a new version breaks a line here, read what
has changed there before anything else: the numbers of a run may look fine and be wrong."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trl
from packaging.version import Version
from transformers import Trainer
from transformers.modeling_layers import GenericForSequenceClassification
from trl import (
    DistillationTrainer,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOTrainer,
    RewardTrainer,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.gkd import GKDTrainer
from trl.experimental.gold import GOLDTrainer
from trl.trainer.utils import FusedCausalLMOutput

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.trl import contract
from prefixtree.integrations.trl.sharding import DataSetTrainer
from tests.support.warm import run_warm

try:
    from tests.integrations.trl.async_grpo import AsyncGRPOTrainer, packing
except (ImportError, AttributeError) as problem:
    # its tests say so; the others still tell what has changed
    AsyncGRPOTrainer = packing = None
    missing = str(problem)

SCORES = contract.SCORES
BOTH = pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer])


def source(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def calls(function: Any, name: str) -> list[ast.Call]:
    """Calls of `name`, bare or as an attribute, in the source of a function or a class."""

    def named(call: ast.Call) -> str:
        return getattr(call.func, "attr", getattr(call.func, "id", ""))

    found = [node for node in ast.walk(source(function)) if isinstance(node, ast.Call)]
    return [call for call in found if named(call) == name]


def methods(cls: type, uses: Callable[[Any], Any]) -> dict[str, int]:
    """Methods of a class and how often they do something, where they do."""
    own = {n: f for n, f in vars(cls).items() if inspect.isfunction(inspect.unwrap(f))}
    counts = {name: len(uses(function)) for name, function in own.items()}
    return {name: count for name, count in counts.items() if count}


def keywords(call: ast.Call) -> dict[str, str]:
    return {k.arg: ast.unparse(k.value) for k in call.keywords if k.arg is not None}


def names_read(function: Any, variable: str) -> set[str]:
    """Strings that a function subscripts a variable with or passes to its `get`."""

    def visit(node: ast.AST) -> Iterator[Any]:
        for child in ast.walk(node):
            match child:
                case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=key)):
                    yield name, key
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=name), attr="get"),
                    args=[ast.Constant(value=key), *_],
                ):
                    yield name, key

    return {key for name, key in visit(source(function)) if name == variable}


def test_the_version_is_a_tested_one() -> None:
    first, last = map(Version, contract.TESTED)
    assert first <= Version(trl.__version__) <= last, (
        f"these tests ran with TRL {trl.__version__}: where they all pass, widen contract.TESTED"
    )


IMPORTS = """
import sys
from transformers.models.qwen3 import modeling_qwen3
from trl import GRPOTrainer
before = set(sys.modules)
from prefixtree import compile_layers, sequence_logprobs
from prefixtree.integrations.trl import PrefixTreeGRPOTrainer, tree_rollouts
print(*sorted(name for name in set(sys.modules) - before if not name.startswith("prefixtree")))
"""


def test_our_imports_load_nothing_that_trls_trainer_did_not() -> None:
    """No numba, no other trainer, no model of another family."""
    done = run_warm(IMPORTS)
    assert (done.returncode, done.stdout.split()) == (0, [])


def test_signatures() -> None:
    contract.check_trainer(GRPOTrainer)
    with pytest.raises(UnsupportedError, match=r"GRPOTrainer\._prepare_inputs"):
        contract.check_parameters(lambda self: 0, "GRPOTrainer._prepare_inputs", ("self", "batch"))
    with pytest.raises(UnsupportedError, match="reordered"):
        contract.check_parameters(lambda b, a: 0, "f", ("a", "b"))


def test_distillation() -> None:
    """The student is called in one place, which gets the wrapper here; GKD's loss divides no logits
    by the temperature, GOLD's does."""
    contract.check_trainer(DistillationTrainer)
    contract.check_trainer(GKDTrainer)
    contract.check_trainer(GOLDTrainer)
    (call,) = calls(DistillationTrainer.compute_loss, "_forward_redirection")
    assert [ast.unparse(a) for a in call.args] == [
        *("model", "unwrapped_student", "self._compute_loss"),
        *("unwrapped_student", "inputs", "num_items_in_batch"),
    ]
    assert methods(DistillationTrainer, lambda f: calls(f, "_forward_redirection")) == {
        "compute_loss": 1,
        "_compute_loss": 1,
    }
    expected = {"student_logits", "teacher_logits", "labels", "beta", "num_items_in_batch"}
    (loss,) = calls(GKDTrainer.compute_loss, "generalized_jsd_loss")
    assert keywords(loss).keys() == expected
    (loss,) = calls(GOLDTrainer.compute_loss, "generalized_jsd_loss")
    assert keywords(loss).keys() == {*expected, "temperature"}


@BOTH
def test_all_scores_come_from_one_method(trainer: Any) -> None:
    """Policy once, old policy once, reference twice (with an adapter and without)."""
    assert methods(trainer, lambda f: calls(f, SCORES)) == {
        "_generate_and_score_completions": 3,
        "_compute_loss": 1,
    }
    (policy,) = calls(trainer._compute_loss, SCORES)
    assert [ast.unparse(a) for a in policy.args] == [
        *("model", "input_ids", "attention_mask", "logits_to_keep")
    ]
    assert keywords(policy).keys() == {
        "compute_entropy",
        "compute_aux_loss",
        *contract.IMAGE_PARAMETERS,
    }
    for call in calls(trainer._generate_and_score_completions, SCORES):
        given = [ast.unparse(a) for a in call.args[1:]]
        assert given[:3] == ["prompt_completion_ids", "attention_mask", "logits_to_keep"]
        # the rest is in forward_kwargs, which only a batch with images fills
        assert {**keywords(call), **dict(zip(["batch_size"], given[3:], strict=False))} == {
            "batch_size": "batch_size",
            "num_images": "num_images",
            "num_tiles": "num_tiles",
        }


@BOTH
def test_where_a_kept_trunk_lives(trainer: Any) -> None:
    """From the first micro-batch of a step to the backward of the last, before the clip."""
    step = ast.unparse(source(trainer.training_step))
    assert step.index("super().training_step(") < step.index("self._step += 1")
    prepare = ast.unparse(source(trainer._prepare_inputs))
    assert "self._buffered_inputs[self._step % self.args.steps_per_generation]" in prepare
    loss = ast.unparse(source(trainer._compute_loss))
    for kind in ("ids", "mask"):
        assert f"torch.cat([prompt_{kind}, completion_{kind}], dim=1)" in loss
    assert len(calls(Trainer.training_step, "backward")) == 1
    loop = ast.unparse(source(Trainer._run_epoch))
    assert "self.current_gradient_accumulation_steps = len(batch_samples)" in loop
    # within what may leave gradients local, and once per micro-batch
    within = "with sync_context():\n"
    assert loop.count("self.training_step(") == 1
    assert loop.index(within) < loop.index("self.training_step(") < loop.index("_clip_grad_norm(")
    assert "_set_sync_gradients(do_sync_step)" in loop


@BOTH
def test_no_other_method_runs_a_model(trainer: Any) -> None:
    """`model(...)` and the fused head are called in the replaced method alone."""
    forwards = methods(
        trainer,
        lambda f: [c for name in ("model", "ref_model", "self_model") for c in calls(f, name)],
    )
    assert forwards == {SCORES: 1}
    fused = methods(
        trainer,
        lambda f: [n for n in ast.walk(source(f)) if getattr(n, "arg", "") == "fused_lm_head"],
    )
    assert fused == {SCORES: 1}
    assert methods(trainer, lambda f: calls(f, "add_fused_lm_head")) == {"__init__": 2}


@BOTH
def test_what_the_replaced_method_means(trainer: Any) -> None:
    """Labels are completion tokens under the mask, logits are divided by the temperature."""
    code = ast.unparse(source(inspect.unwrap(trainer._get_per_token_logps_and_entropies)))
    for line in (
        "batch_size = batch_size or input_ids.size(0)",
        "labels = input_ids_batch.masked_fill(attention_mask_batch == 0, -100)",
        "labels[:, :-logits_to_keep] = -100",
        "with self.accelerator.autocast():",
        "outputs = model(**model_inputs, labels=labels, fused_lm_head=True)",
        "all_logps.append(outputs.log_probs[:, -logits_to_keep:])",
        "all_entropies.append(outputs.entropy[:, -logits_to_keep:])",
        "entropies = torch.cat(all_entropies, dim=0) if compute_entropy else None",
        "return (logps, entropies, aux_loss)",
    ):
        assert line in code, f"{SCORES} no longer says: {line}"
    for call in calls(trainer.__init__, "add_fused_lm_head"):
        assert keywords(call)["temperature"] == "self.temperature"


def test_masks_of_the_loss_are_trls_own() -> None:
    code = ast.unparse(source(GRPOTrainer._compute_loss))
    for line in (
        "input_ids = torch.cat([prompt_ids, completion_ids], dim=1)",
        "attention_mask = torch.cat([prompt_mask, completion_mask], dim=1)",
        "logits_to_keep = completion_ids.size(1)",
        "mask = completion_mask if 'tool_mask' not in inputs else completion_mask * "
        "inputs['tool_mask']",
    ):
        assert line in code, f"GRPOTrainer._compute_loss no longer says: {line}"
    # entries of a batch: what is new here may need a row a completion
    assert names_read(GRPOTrainer._compute_loss, "inputs") == {
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "tool_mask",
        "advantages",
        "old_per_token_logps",
        "ref_per_token_logps",
        "sampling_per_token_logps",
        "importance_sampling_ratio",
        "num_items_in_batch",
        *contract.IMAGE_PARAMETERS,
    }


@BOTH
def test_the_shuffle(trainer: Any) -> None:
    """Generated, shuffled, cut into micro-batches and kept, all in `_prepare_inputs`."""
    body = inspect.unwrap(trainer._prepare_inputs)
    order = ("_generate_and_score_completions", "shuffle_sequence_dict", "split_tensor_dict")
    code = ast.unparse(source(body))
    places = [code.index(f"{name}(") for name in order]
    assert places == sorted(places)
    assert "self._buffered_inputs = [" in code
    assert "inputs = self._buffered_inputs[" in code
    assert [len(calls(body, name)) for name in order] == [2, 1, 1]
    used = methods(trainer, lambda f: calls(f, "shuffle_sequence_dict"))
    assert used == {"_prepare_inputs": 1}
    assert hasattr(inspect.getmodule(trainer), "shuffle_sequence_dict")


@BOTH
def test_groups_are_neighbours(trainer: Any) -> None:
    """Rewards are compared within runs of num_generations rows; micro-batches of old scores are
    runs of the rows that a micro-batch of the loss has."""
    code = ast.unparse(source(trainer._generate_and_score_completions))
    for line in (
        "rewards.view(-1, num_generations)",
        "mode = 'train' if self.model.training else 'eval'",
        "batch_size = self.args.per_device_train_batch_size if mode == 'train'",
    ):
        assert line in code, f"_generate_and_score_completions no longer says: {line}"
    loader = ast.unparse(source(trainer.get_train_dataloader))
    assert "batch_size=self._train_batch_size * self.args.steps_per_generation" in loader


def test_attributes() -> None:
    """Set by `__init__`, and read when a trainer is made or a batch is scored."""
    code = ast.unparse(source(GRPOTrainer.__init__))
    for name in (
        "temperature",
        "aux_loss_enabled",
        "ref_model",
        "_is_vlm",
        "_buffered_inputs",
        "_metrics",
    ):
        assert f"self.{name} = " in code, f"GRPOTrainer.__init__ no longer sets {name}"
    for name in (
        "use_liger_kernel",
        "neftune_noise_alpha",
        "torch_compile",
        "use_transformers_continuous_batching",
        "cache_implementation",
        "cast_lm_head_to_fp32",
        "fp16",
    ):
        assert hasattr(GRPOConfig, name) or name in GRPOConfig.__dataclass_fields__, (
            f"GRPOConfig has no {name}: is what it did refused under another name?"
        )


# ---- DPO and SFT ---------------------------------------------------------------------------------

_BY_PACKED_MODEL = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")


def entries_read(function: Any) -> set[str]:
    """Entries that a function reads of a model's `outputs`."""
    nodes = [node for node in ast.walk(source(function)) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if ast.unparse(node.value) == "outputs"}


def uses_of_model(function: Any) -> set[str]:
    """The uses that a function makes of its argument `model`, beside calling it."""
    tree = source(function)
    called = {id(c.func) for c in ast.walk(tree) if isinstance(c, ast.Call)}
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "model"]
    return {ast.unparse(n) for n in nodes if id(n) not in called}


def test_signatures_of_dpo_and_sft() -> None:
    contract.check_trainer(DPOTrainer)
    contract.check_trainer(SFTTrainer)
    for name in contract.OVERRIDDEN:
        with pytest.raises(UnsupportedError, match=f"has no {name}"):
            contract.check_trainer(type(name, (), {}))


def test_the_fused_heads_entries() -> None:
    names = set(FusedCausalLMOutput.__dataclass_fields__)
    assert names == {"loss", "label_mask", "aux_loss", *_BY_PACKED_MODEL}
    # logits are those of temperature 1
    for trainer in (DPOTrainer, SFTTrainer):
        for call in calls(trainer.__init__, "add_fused_lm_head"):
            assert keywords(call).keys() <= {"outputs"}


def test_no_trainer_sets_what_ours_declare() -> None:
    """`Trainer.deepspeed` once hid a setting of that name: an instance's attribute comes first."""
    ours = {name for name in vars(DataSetTrainer) if not name.startswith("__")}
    for trainer in (Trainer, SFTTrainer, DPOTrainer, DistillationTrainer, GKDTrainer, GOLDTrainer):
        tree = ast.parse(textwrap.dedent(inspect.getsource(trainer)))
        stored = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute)]
        names = {each.attr for each in stored if isinstance(each.ctx, ast.Store)}
        assert len(names) > 3 and not names & ours, (trainer, names & ours)


def test_dpo_scores_in_two_methods() -> None:
    """Policy, logits, and the reference with an adapter or without; all with the fused head but
    the logits."""

    def forwards(function: Any) -> list[ast.Call]:
        return [c for name in ("model", "ref_model") for c in calls(function, name)]

    assert methods(DPOTrainer, forwards) == {"_compute_loss": 4, "compute_ref_log_probs": 1}
    for function in (DPOTrainer._compute_loss, DPOTrainer.compute_ref_log_probs):
        assert uses_of_model(function) == set()
        code = ast.unparse(source(function))
        for line in (
            "{'completion_mask', 'ref_chosen_logps', 'ref_rejected_logps'}",
            "{k: v for k, v in inputs.items() if k not in _non_model_keys}",
            "if self.ref_model is None and is_peft_model(self.model)"
            if function is DPOTrainer.compute_ref_log_probs
            else "if is_peft_model(self.model) and self.ref_model is None",
            "adapter_name='ref' if 'ref' in ",
            "disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)",
            "comp_pos > shared_lens.unsqueeze(1)",
        ):
            assert line in code, f"{function.__name__} no longer says: {line}"
    assert entries_read(DPOTrainer._compute_loss) == {*_BY_PACKED_MODEL, "aux_loss"}
    assert methods(DPOTrainer, lambda f: calls(f, "compute_ref_log_probs")) == {
        "_precompute_ref_logps": 1
    }


def test_where_dpo_takes_its_reference_from() -> None:
    """From the batch if `precompute_ref_logps` says so: the adapter puts them there."""
    code = ast.unparse(source(DPOTrainer._compute_loss))
    assert code.count("precompute_ref_logps") == 1
    assert (
        "if self.precompute_ref_logps:\n        ref_chosen_logps, ref_rejected_logps = "
        "(inputs['ref_chosen_logps'], inputs['ref_rejected_logps'])"
    ) in code
    assert names_read(DPOTrainer._compute_loss, "inputs") == {
        *("input_ids", "attention_mask", "completion_mask"),
        *("ref_chosen_logps", "ref_rejected_logps"),
    }
    assert "self.padding_free = False" in ast.unparse(source(DPOTrainer.__init__))


def test_sft_scores_in_one_method() -> None:
    forwards = methods(SFTTrainer, lambda f: calls(f, "model"))
    # with the fused head three times; logits for two losses that are refused, and for metrics
    assert forwards == {"compute_loss": 6}
    heads = [k for c in calls(SFTTrainer.compute_loss, "model") for k in keywords(c)]
    assert heads.count("fused_lm_head") == 3
    assert entries_read(SFTTrainer.compute_loss) == {
        *("log_probs", "label_mask", "entropy", "is_top1", "aux_loss")
    }
    code = ast.unparse(source(SFTTrainer.compute_loss))
    for line in (
        "per_token_loss = -outputs.log_probs",
        "if self.compute_loss_func is not None:",
        "elif self.label_smoother is not None and self.args.loss_type == 'nll':",
        # the one that hands the model on, under sequence parallelism, which is refused
        "parallelism_config.sp_backend == 'deepspeed'",
    ):
        assert line in code, f"SFTTrainer.compute_loss no longer says: {line}"
    assert len(calls(SFTTrainer.compute_loss, "compute_loss")) == 1


@pytest.mark.parametrize("trainer", [DPOTrainer, SFTTrainer])
def test_attributes_of_dpo_and_sft(trainer: type) -> None:
    code = ast.unparse(source(trainer.__init__))
    for name in ("aux_loss_enabled", "_is_vlm", "_metrics", "padding_free"):
        assert f"self.{name} = " in code, f"{trainer.__name__}.__init__ no longer sets {name}"
    assert ("self.ref_model = " in code) == (trainer is DPOTrainer)
    # what is checked there exists when TRL's constructor computes references
    if trainer is DPOTrainer:
        first = code.index("self._precompute_ref_logps(")
        for name in ("aux_loss_enabled", "_is_vlm", "ref_model"):
            assert code.index(f"self.{name} = ") < first
    for name in ("packing", "eval_packing", "padding_free", "label_smoothing_factor"):
        assert name in SFTConfig.__dataclass_fields__, f"SFTConfig has no {name}"


# ---- KTO and rewards -----------------------------------------------------------------------------


def test_kto_scores_in_three_methods() -> None:
    """Policy, logits, and the reference with an adapter or without; mismatched answers; the
    reference's, both of which are packed. A batch says what to take for the reference's."""
    contract.check_trainer(KTOTrainer)

    def forwards(function: Any) -> list[ast.Call]:
        return [c for name in ("model", "ref_model") for c in calls(function, name)]

    assert methods(KTOTrainer, forwards) == {
        "compute_ref_log_probs": 2,
        "_compute_kl_logps": 1,
        "_compute_loss": 4,
    }
    code = ast.unparse(source(KTOTrainer._compute_loss))
    for line in (
        "KL_logps = self._compute_kl_logps(model, batch)",
        "if self.precompute_ref_logps:\n        ref_chosen_logps = batch['ref_logps']",
        "ref_KL_logps = batch['ref_KL_logps']",
    ):
        assert line in code, f"KTOTrainer._compute_loss no longer says: {line}"
    assert code.count("precompute_ref_logps") == 1
    assert entries_read(KTOTrainer._compute_loss) == {
        *("log_probs", "entropy", "mean_logits", "aux_loss")
    }
    # it takes no images, which is why they are refused
    assert "pixel_values" not in ast.unparse(source(KTOTrainer.compute_ref_log_probs))


def test_where_rewards_are_read() -> None:
    contract.check_trainer(RewardTrainer)
    assert methods(RewardTrainer, lambda f: calls(f, "model")) == {"compute_loss": 1}
    assert entries_read(RewardTrainer.compute_loss) == {"logits"}
    assert names_read(RewardTrainer.compute_loss, "inputs") == {
        *("use_cache", "margin", "attention_mask")
    }
    code = ast.unparse(source(inspect.unwrap(GenericForSequenceClassification.forward)))
    for line in (
        "non_pad_mask = (input_ids != self.config.get_text_config().pad_token_id)",
        "last_non_pad_token = (token_indices * non_pad_mask).argmax(-1)",
    ):
        assert line in code, f"transformers' classifiers no longer say: {line}"


# ---- AsyncGRPO -----------------------------------------------------------------------------------


@pytest.fixture
def async_grpo() -> None:
    if Version(trl.__version__) < Version(contract.TREES_SINCE):
        pytest.skip(f"AsyncGRPO packs trees from TRL {contract.TREES_SINCE} on")
    assert packing is not None, f"TRL has no AsyncGRPO that packs trees: {missing}"


@pytest.mark.usefixtures("async_grpo")
def test_the_tree_keywords() -> None:
    contract.check_tree_attention(packing.tree_attention, "tree_fa3")
    assert packing.TREE_ATTENTION == "tree_fa3"
    # registered as a trainer is made: ours must come after
    assert len(calls(AsyncGRPOTrainer.__init__, "register_tree_attention")) == 1
    registered = [
        [ast.unparse(a) for a in c.args] for c in calls(packing.register_tree_attention, "register")
    ]
    assert registered == [
        ["TREE_ATTENTION", "tree_attention"],
        ["TREE_ATTENTION", "lambda **kwargs: None"],
    ]
    (load,) = calls(AsyncGRPOTrainer.__init__, "create_model_from_path")
    assert keywords(load)["attn_implementation"] == "TREE_ATTENTION"
    code = ast.unparse(source(AsyncGRPOTrainer.compute_loss))
    for name in contract.TREE_KEYWORDS:
        assert f"'{name}'" in code, f"AsyncGRPOTrainer.compute_loss no longer passes {name}"
    (forward,) = calls(AsyncGRPOTrainer.compute_loss, "model")
    assert {"input_ids", "position_ids", "shift_labels"} <= keywords(forward).keys()
    assert "attention_mask" not in keywords(forward)


@pytest.mark.usefixtures("async_grpo")
def test_what_the_tree_keywords_mean() -> None:
    """Queries are segments, keys the gathered paths, causal from the path's end."""
    code = ast.unparse(source(packing.tree_attention))
    for line in (
        "key.index_select(0, tree_kv_index)",
        "value.index_select(0, tree_kv_index)",
        "causal=True",
        "window_size=(sliding_window - 1, 0) if sliding_window else (-1, -1)",
        "softmax_scale=scaling",
        "return (out.unsqueeze(0), None)",
    ):
        assert line in code, f"tree_attention no longer says: {line}"
    assert "self.aux_loss_enabled = " in ast.unparse(source(AsyncGRPOTrainer.__init__))


@pytest.mark.usefixtures("async_grpo")
def test_the_row_that_packs() -> None:
    row = packing.TreeRow()
    for name in ("add", "pack", "fits"):
        assert callable(getattr(row, name)), f"TreeRow has no {name}"
    assert list(inspect.signature(row.add).parameters) == ["sample"]
