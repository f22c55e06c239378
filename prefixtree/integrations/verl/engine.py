"""verl's FSDP and FSDP2 engines, with every micro-batch packed into its prefix forest.

Subclasses change how a batch is split and how the model is called. Sharding, offloading, losses,
optimiser, weight export and checkpoints stay verl's. Log-probabilities, entropies and values come
back in verl's jagged layout. Without attn_implementation="prefixtree" they run verl's code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import get_init_weight_context_manager
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import (
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)
from verl.workers.engine.utils import detach_tree

from prefixtree.errors import UnsupportedError
from prefixtree.experts.routers import routed_layers
from prefixtree.integrations.core.batch import Batch
from prefixtree.integrations.core.trunks import is_kept, token_cost
from prefixtree.integrations.core.work import Work
from prefixtree.integrations.verl.batches import (
    TRAINED_TOKENS,
    MicroRows,
    add_routes,
    count_tokens,
    in_order,
    micro_rows,
    mini_batches_of,
    rows_of,
    score_options,
    scores_in_layout,
    split,
    values_in_layout,
)
from prefixtree.integrations.verl.distillation import TopK, wants_topk
from prefixtree.integrations.verl.images import (
    check_positions,
    check_unpatched,
    fill_gradients_of_encoder,
    images_of,
    without_patches,
)
from prefixtree.integrations.verl.metrics import NAME, MeteredEngine, work_of
from prefixtree.integrations.verl.refusals import (
    COMPILE,
    RECOMPUTE,
    check_images,
    check_override,
    check_settings,
    check_step,
    turn_off_fused_kernels,
)
from prefixtree.kernels.lm_head.measures import MeasuredEdges
from prefixtree.models.checks import find_causal_lm
from prefixtree.models.compiled import compile_layers
from prefixtree.packing.layout import PackedForest, pack
from prefixtree.planning.costs import ImportCost
from prefixtree.planning.micro_batch import MicroBatch
from prefixtree.recompute.choose import Recompute
from prefixtree.scoring.edges import SequenceScores
from prefixtree.scoring.kept_runs import KeptRuns
from prefixtree.scoring.kept_trunks import kept_trunks, kept_values
from prefixtree.scoring.logprobs import sequence_logprobs
from prefixtree.scoring.values import sequence_values


class Call(NamedTuple):
    """A mini-batch that verl wants to run, and its rows on the host."""

    data: TensorDict
    rows: Batch
    loss_function: Callable[..., Any] | None
    forward_only: bool


# (scored micro-batch) -> the outputs that verl's loss reads
_OutputsOf = Callable[[MicroRows], dict[str, Any]]
# an entry with a vendor precedes the engines of verl
_REGISTERED = {"backend": ["fsdp", "fsdp2"], "device": "cuda", "vendor": "nvidia"}


class _FsdpEngine(MeteredEngine, FSDPEngineWithLMHead):
    """The common part of actor, reference and critic; `sees`: there is a vision encoder."""

    model_output: str

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        hf_config = model_config.hf_config
        self._read_attention(hf_config)
        self.sees = getattr(hf_config, "vision_config", None) is not None
        if self.packs:
            turn_off_fused_kernels(model_config, engine_config)
            check_settings(model_config, engine_config, self.model_output)
        recompute, compiles = (vars(hf_config).pop(name, None) for name in (RECOMPUTE, COMPILE))
        instead, strategy = "enable_gradient_checkpointing", engine_config.strategy
        self.recompute: Recompute = check_override(RECOMPUTE, recompute, self.packs, instead)
        is_served = self.packs and self.model_output == "log_probs"
        self.compiles = bool(check_override(COMPILE, compiles, is_served, strategy=strategy))
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _build_module(self) -> Any:
        """Builds the module as verl does; with a vision encoder, without verl's patches."""
        if not (self.packs and self.sees):
            return super()._build_module()
        with without_patches():
            return super()._build_module()

    def _build_model_optimizer(self) -> None:
        """Builds as verl does, then compiles the layers in place if that is set."""
        super()._build_model_optimizer()
        if self.compiles:
            compile_layers(self.module)
        self._costs: dict[bool, ImportCost | None] = {}
        if self.packs:
            # read now, while adapters are on: a reference without them is planned alike
            self._import_cost(as_trained=True)
            limit = self.engine_config.max_token_len_per_gpu
            self._announce(
                self.model_config.hf_config,
                self._autocast_dtype,
                gives=self.model_output,
                recompute=self.recompute,
                max_token_len_per_gpu=limit if self.engine_config.use_dynamic_bsz else None,
            )

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Runs all micro-batches of a batch, gradients added; results in the batch's order."""
        if not self.packs:
            return super().forward_backward_batch(data, loss_function, forward_only)
        serves_topk = self.model_output == "log_probs"
        takes = {"sees": self.sees, "serves_topk": serves_topk}
        check_step(data, loss_function, forward_only, **takes)
        tu.assign_non_tensor(
            data,
            sp_size=self.ulysses_sequence_parallel_size,
            dp_size=self.get_data_parallel_size(),
            batch_num_tokens=count_tokens(data, self.get_data_parallel_group()),
        )
        parts = [(0, data)]
        if forward_only and self.model_output == "log_probs":
            parts = mini_batches_of(data, self.get_data_parallel_size())
        outputs: list[Any] = []
        indices: list[np.ndarray] = []
        self._work = Work()
        for first, part in parts:
            call = Call(part, rows_of(part), loss_function, forward_only)
            results, batches = self._forwards_and_backwards(call)
            outputs += results
            indices += [first + batch.sequence_indices for batch in batches]
        if self.sees and not forward_only:
            fill_gradients_of_encoder(self.module)
        return in_order(outputs, indices)

    def _forwards_and_backwards(self, call: Call) -> tuple[list[Any], Sequence[MicroBatch]]:
        """Runs a mini-batch: the results of its micro-batches, and the micro-batches."""
        data, rows, _, forward_only = call
        group = self.get_data_parallel_group()
        if self.sees:
            self._find_images(data, rows, group)
        self._find_routes(data, rows)
        keep_outputs = forward_only or tu.get_non_tensor_data(
            data=data, key="return_model_output", default=False
        )
        as_trained = not forward_only or self._plans_as_trained(data)
        cost, ranks = self._import_cost(as_trained), self.ulysses_sequence_parallel_size
        batches = split(data, rows, group, ranks, import_cost=cost, has_backward=as_trained)
        self._work += work_of(batches, None if forward_only else rows.masks)
        outputs = []
        no_graph = torch.no_grad() if forward_only else nullcontext()
        with no_graph, self._kept(call, batches) as kept:
            for step, batch in enumerate(batches):
                # backwards of trunks come in between, so each is reduced
                last = step == len(batches) - 1 or kept is not None
                with (
                    nullcontext()
                    if forward_only
                    else self._gradient_sync_context(is_last_micro_batch=last),
                    torch.profiler.record_function(f"micro_batch{step}"),
                ):
                    outputs_of = None
                    if kept is not None:
                        with self._autocast():
                            outputs_of = next(kept)
                    loss, output = self._step(call, batch, outputs_of)
                    if not forward_only:
                        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                    if not keep_outputs:
                        output.pop("model_output")
                outputs.append(output)
        return outputs, batches

    def _find_images(self, data: TensorDict, rows: Batch, group: Any) -> None:
        """Gives a batch its images, checked; None where no rank has any."""
        check_unpatched(self.module)
        rows.images = images_of(data, rows, self.model_config.hf_config, group)
        if rows.images is not None:
            check_images(self.engine_config)
        check_positions(data, rows, self.module)

    def _find_routes(self, data: TensorDict, rows: Batch) -> None:
        """Gives a batch its recorded experts, where this engine replays them."""

    # ---- trunks that micro-batches share ---------------------------------------------------------

    def _plans_as_trained(self, data: TensorDict) -> bool:
        """Whether scoring plans as training does, because the limits are the same."""
        trained = tu.get_non_tensor_data(data=data, key=TRAINED_TOKENS, default=None)
        trained = trained or self.engine_config.max_token_len_per_gpu
        limit = tu.get_non_tensor_data(data=data, key="max_token_len_per_gpu", default=None)
        # a reference's engine has no limit of training
        return trained is None or trained == limit

    def _import_cost(self, as_trained: bool) -> ImportCost | None:
        """The cost of a kept trunk's token; None where trees are cut instead."""
        divided = self.pad_to_length or self.ulysses_parallel_group is not None
        if divided or not is_kept(self.module):
            return None
        if as_trained not in self._costs:
            # without a graph a token takes little compared with a trunk's keys and values
            recompute: Recompute = "all"
            if as_trained:
                checkpoints = self.model_config.enable_gradient_checkpointing
                recompute = self.recompute or ("all" if checkpoints else "nothing")
            self._costs[as_trained] = token_cost(self.module, recompute)
        return self._costs[as_trained]

    @contextmanager
    def _kept(
        self, call: Call, batches: Sequence[MicroBatch]
    ) -> Iterator[Iterator[_OutputsOf] | None]:
        """A context with the outputs of micro-batches that keep trunks; None for others."""
        if getattr(batches, "trunks", None) is None:
            yield None
            return
        with ExitStack() as stack:
            # trunks run as the forwards of a micro-batch do
            with self._autocast():
                kept = stack.enter_context(self._kept_outputs(call, batches))
            yield kept

    def _kept_outputs(
        self, call: Call, batches: Sequence[MicroBatch]
    ) -> AbstractContextManager[Iterator[_OutputsOf]]:
        """A context with the outputs of each micro-batch, as a function of its rows."""
        raise NotImplementedError

    # ---- a micro-batch ---------------------------------------------------------------------------

    def _step(self, call: Call, batch: MicroBatch, outputs_of: _OutputsOf | None) -> Any:
        """Runs the model over a micro-batch, unless it is scored already, and then verl's loss."""
        micro = micro_rows(call.data, call.rows, batch).to(get_device_id())
        with self._autocast():
            if outputs_of is None:
                bucket = self.pad_to_length_bucket if self.pad_to_length else None
                packed = pack(batch.forest, bucket).to(get_device_name())
                model_output = self._model_output(call, micro, packed)
            else:
                model_output = outputs_of(micro)
            if call.loss_function is None:
                assert call.forward_only, "a training step needs a loss function"
                loss, metrics = torch.tensor(1.0, device=get_device_name()), {}
            else:
                loss, metrics = call.loss_function(
                    model_output=model_output,
                    data=micro.data,
                    dp_group=self.get_data_parallel_group(),
                )
        output = {
            "model_output": detach_tree(model_output),
            "loss": loss.detach().item(),
            "metrics": metrics,
        }
        return loss, output

    def _autocast(self) -> Any:
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)

    def _model_output(self, call: Call, micro: MicroRows, packed: PackedForest) -> dict[str, Any]:
        raise NotImplementedError


@EngineRegistry.register(model_type="language_model", **_REGISTERED)
class PackedActorEngine(_FsdpEngine):
    """Actor and reference: log-probabilities and entropies."""

    model_output = "log_probs"
    _is_reference = False

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """A context in which the actor without its adapter is the reference, as verl calls it."""
        self._is_reference = True
        try:
            with super().disable_adapter():
                yield
        finally:
            self._is_reference = False

    def _find_routes(self, data: TensorDict, rows: Batch) -> None:
        """Gives a batch the experts that the rollout engine recorded; a reference chooses."""
        is_reference = self._is_reference or self.engine_config.forward_only
        if data.get("routed_experts", None) is None or is_reference:
            return
        try:
            has_experts = routed_layers(find_causal_lm(self.module))
        except UnsupportedError as problem:
            raise UnsupportedError(
                f"the batch has routed_experts: {problem}; or set "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=False"
            ) from None
        add_routes(data, rows, has_experts, "R3")

    def _model_output(self, call: Call, micro: MicroRows, packed: PackedForest) -> dict[str, Any]:
        """Computes log_probs, entropy and distillation losses: jagged [B, n], 0 off responses."""
        top_k = None
        if wants_topk(call.data) and call.loss_function is not None:
            top_k = TopK(call.loss_function, micro.data, packed, micro.rows.masks)
        scores = sequence_logprobs(
            self.module,
            packed,
            **score_options(*micro),
            measure=None if top_k is None else top_k.measure,
            recompute=self.recompute,
            # verl's engine reads logits alone, whatever the model's config asks for
            output_router_logits=False,
            group=self.ulysses_parallel_group,
            images=call.rows.images,
        )
        return _outputs_of(scores, top_k, range(len(scores.logprobs)), micro)

    @contextmanager
    def _kept_outputs(
        self, call: Call, batches: Sequence[MicroBatch]
    ) -> Iterator[Iterator[_OutputsOf]]:
        top_k: TopK | None = None

        def measure(logits: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
            assert top_k is not None
            return top_k.measure(logits, edges)

        measured = call.loss_function if wants_topk(call.data) else None
        with kept_trunks(
            self.module,
            batches,
            **score_options(call.data, call.rows),
            recompute=self.recompute,
            output_router_logits=False,
            measure=None if measured is None else measure,
            images=call.rows.images,
        ) as kept:
            if measured is not None:
                assert isinstance(kept, KeptRuns)
                # edges have their numbers in the forest of the whole batch
                top_k = TopK(measured, call.data, kept.packed, call.rows.masks)
            yield (
                partial(_outputs_of, scores, top_k, batch.sequence_indices.tolist())
                for batch, scores in kept
            )


def _outputs_of(
    scores: SequenceScores, top_k: TopK | None, sequences: Sequence[int], micro: MicroRows
) -> dict[str, torch.Tensor]:
    """Puts scores, and distillation losses of `sequences` of the batch, into verl's layout."""
    more = {} if top_k is None else top_k.outputs(scores, sequences)
    return scores_in_layout(scores, micro, more)


@EngineRegistry.register(model_type="value_model", **_REGISTERED)
class PackedCriticEngine(_FsdpEngine, FSDPEngineWithValueHead):
    """Critic: a value at every token."""

    model_output = "values"

    def _build_module(self) -> Any:
        """Builds a token classifier with one label; verl always asks for flash_attention_2."""
        if not self.packs:
            return super()._build_module()
        from transformers import AutoModelForTokenClassification

        config = self.model_config.hf_config
        config.num_labels = 1
        config.classifier_dropout = 0.0
        dtype = PrecisionType.to_dtype(
            self.engine_config.model_dtype
            or ("bf16" if self.engine_config.forward_only else "fp32")
        )
        # as in verl: meta tensors on all ranks but the first, unless weights are tied
        context = get_init_weight_context_manager(
            use_meta_tensor=not config.tie_word_embeddings, mesh=self.device_mesh
        )
        with context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = AutoModelForTokenClassification.from_pretrained(
                self.model_config.local_path,
                config=config,
                dtype=dtype,
                attn_implementation=NAME,
                trust_remote_code=self.model_config.trust_remote_code,
            )
        module.to(dtype)
        if self.model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        return module

    def _model_output(self, call: Call, micro: MicroRows, packed: PackedForest) -> dict[str, Any]:
        """Computes values, jagged [B, n]."""
        values = sequence_values(
            self.module, packed, recompute=self.recompute, group=self.ulysses_parallel_group
        )
        return values_in_layout(values, micro)

    @contextmanager
    def _kept_outputs(
        self, call: Call, batches: Sequence[MicroBatch]
    ) -> Iterator[Iterator[_OutputsOf]]:
        with kept_values(self.module, batches, recompute=self.recompute) as kept:
            yield (partial(values_in_layout, values) for _, values in kept)
