"""verl's Megatron engines, with every micro-batch packed into its prefix forest.

    actor_rollout_ref.model.external_lib=prefixtree.integrations.verl.megatron
    +actor_rollout_ref.model.override_config.attn_implementation=prefixtree

Importing this registers them. They change the layers of the model, how a batch is split and how the
model is called; parallelism, losses, optimiser, weight export and checkpoints stay verl's. Without
attn_implementation="prefixtree" they run verl's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.megatron.pipeline_parallel import make_batch_generator
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import (
    MegatronEngineWithLMHead,
    MegatronEngineWithValueHead,
)

from prefixtree.errors import UnsupportedError, refuse
from prefixtree.integrations.megatron import tree_logprobs, tree_outputs, tree_spec
from prefixtree.integrations.megatron.checks import find_model
from prefixtree.integrations.megatron.routers import recording
from prefixtree.integrations.verl.batches import (
    MicroRows,
    add_routes,
    count_tokens,
    in_order,
    micro_rows,
    rows_of,
    score_options,
    scores_in_layout,
    split,
    values_in_layout,
)
from prefixtree.integrations.verl.metrics import MeteredEngine, work_of
from prefixtree.integrations.verl.refusals import (
    COMPILE,
    PROVIDER,
    RECOMPUTE,
    check_megatron_settings,
    check_override,
    check_step,
    turn_off_fused_kernels,
)
from prefixtree.integrations.verl.routes import (
    asks_for_routes,
    check_stages,
    has_experts,
    is_recorded,
    routes_of_batch,
    to_jagged_routes,
)
from prefixtree.packing.layout import PackedForest, pack

# an entry with a vendor precedes the engines of verl
_REGISTERED = {"backend": "megatron", "device": "cuda", "vendor": "nvidia"}


class _MegatronEngine(MeteredEngine, MegatronEngineWithLMHead):
    """The common part of actor, reference and critic."""

    # the choices of routers in the micro-batches of a forward that records them
    _recorded: list[torch.Tensor] | None = None

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        hf_config = model_config.hf_config
        self._read_attention(hf_config)
        # Megatron has settings of its own for them
        instead = "override_transformer_config.recompute_granularity"
        for name in (RECOMPUTE, COMPILE):
            check_override(name, vars(hf_config).pop(name, None), False, instead)
        if self.packs:
            turn_off_fused_kernels(model_config, engine_config)
            check_megatron_settings(model_config, engine_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._announce(hf_config, PrecisionType.to_dtype(engine_config.dtype))

    def _build_tf_config(self) -> None:
        super()._build_tf_config()
        if self.packs:
            provider = self.provider
            refuse(PROVIDER, provider)
            provider.transformer_layer_spec = tree_spec(provider.transformer_layer_spec)

    # ---- a batch ---------------------------------------------------------------------------------

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Runs all micro-batches of a batch through the pipeline and accumulates gradients."""
        if not self.packs:
            return super().forward_backward_batch(data, loss_function, forward_only)
        check_step(data, loss_function, forward_only)
        config, mode = self.tf_config, self.engine_config.router_replay.mode
        records, rows = is_recorded(data, mode, forward_only), rows_of(data)
        if records:
            check_stages(config)
        if asks_for_routes(data) and not records:
            add_routes(data, rows, has_experts(config), mode)
        self._recorded = [] if records else None
        group = self.get_data_parallel_group()
        stages = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        multiple = config.microbatch_group_size_per_vp_stage if stages > 1 else 1
        batches = split(data, rows, group, multiple=multiple)
        tu.assign_non_tensor(
            data,
            sp_size=1,
            dp_size=self.get_data_parallel_size(),
            batch_num_tokens=count_tokens(data, group),
            num_micro_batch=len(batches),
        )
        self._work = work_of(batches, None if forward_only else rows.masks)
        size = config.tensor_model_parallel_size if config.sequence_parallel else None
        # packed once, for all virtual stages
        micro_batches = [
            (micro_rows(data, rows, batch), pack(batch.forest, size)) for batch in batches
        ]
        postprocess = partial(
            self.postprocess_micro_batch_func,
            forward_only=forward_only,
            loss_function=loss_function,
        )
        outputs = get_forward_backward_func()(
            forward_step_func=partial(
                self.forward_step,
                logits_processor_func=loss_function,
                postprocess_micro_batch_func=postprocess,
            ),
            data_iterator=make_batch_generator(micro_batches, vpp_size=len(self.module)),
            model=self.module,
            num_microbatches=len(micro_batches),
            # shapes are exchanged (variable_seq_lengths)
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        recorded = None
        if self._recorded is not None:
            recorded = routes_of_batch(self._recorded, batches, config)
            self._recorded = None
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return {}
        results = in_order(outputs, [batch.sequence_indices for batch in batches])
        if recorded is not None:
            results["model_output"]["routed_experts"] = recorded
        return results

    # ---- a micro-batch ---------------------------------------------------------------------------

    def forward_step(
        self,
        batch_iter: Iterator[Any],
        model: Any,
        logits_processor_func: Any,
        postprocess_micro_batch_func: Callable[..., Any],
    ) -> Any:
        """Runs one stage over one micro-batch, as Megatron's schedule asks."""
        if not self.packs:
            return super().forward_step(
                batch_iter, model, logits_processor_func, postprocess_micro_batch_func
            )
        micro, packed = next(batch_iter)
        micro, packed = micro.to(get_device_id()), packed.to(get_device_name())
        if self._recorded is None:
            output = self._outputs(model, micro, packed)
        else:
            with recording(find_model(model)) as chosen:
                output = self._outputs(model, micro, packed)
            self._recorded.append(to_jagged_routes(packed.unpack(chosen())))
        return output, partial(postprocess_micro_batch_func, data=micro.data)

    def _outputs(self, model: Any, micro: MicroRows, packed: PackedForest) -> Any:
        raise NotImplementedError


@EngineRegistry.register(model_type="language_model", **_REGISTERED)
class PackedMegatronActorEngine(_MegatronEngine):
    """Actor and reference: log-probabilities and entropies."""

    def _outputs(self, model: Any, micro: MicroRows, packed: PackedForest) -> Any:
        """Computes log_probs and entropy, jagged [B, n], 0 outside responses; or hidden states."""
        scores = tree_logprobs(
            model,
            packed,
            **score_options(*micro),
        )
        return scores if isinstance(scores, torch.Tensor) else scores_in_layout(scores, micro)


@EngineRegistry.register(model_type="value_model", **_REGISTERED)
class PackedMegatronCriticEngine(_MegatronEngine, MegatronEngineWithValueHead):
    """Critic: a value at every token."""

    def _outputs(self, model: Any, micro: MicroRows, packed: PackedForest) -> Any:
        """Computes values, jagged [B, n], which `prepare_model_outputs` names; or hidden states."""
        output = tree_outputs(model, packed)
        if not find_model(model).post_process:
            return output
        if output.shape != (1, packed.num_tokens, 1):
            raise UnsupportedError(
                f"the critic returned {list(output.shape)}, expected one value per token, "
                f"{[1, packed.num_tokens, 1]}"
            )
        return values_in_layout(packed.unpack(output[0]), micro)["values"]
