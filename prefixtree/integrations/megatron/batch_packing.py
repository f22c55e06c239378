"""`pack_batches`: a model computes each distinct token of a THD batch once, for callers that know
nothing of forests.

Two hooks do it. Before the model, the sequences of the batch are packed into a forest. Before the
output layer, the hidden states are copied back to the tokens of the batch. The embedding and the
layers run over distinct tokens. The output layer sees every token; or, with a temperature, every
edge once, and its scores are copied back after the model. Legend: R tokens of the caller's batch,
its padding included, T packed tokens, U edges, d hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)

from prefixtree.errors import UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.integrations.megatron.checks import (
    check_calls,
    check_model,
    find_model,
    routed_tokens,
)
from prefixtree.integrations.megatron.context_parallel import ForestParams, LocalForest
from prefixtree.integrations.megatron.routers import RoutedTokens, check_no_replay
from prefixtree.integrations.megatron.scoring import check_head, returned_scores, scoring_layer
from prefixtree.kernels.lm_head.logprobs import ScoreOptions
from prefixtree.kernels.operators import counted_calls
from prefixtree.models.changes import changing
from prefixtree.packing.copies import GatherIndex, gather
from prefixtree.packing.layout import PackedForest, pack
from prefixtree.scoring.edges import find_edges
from prefixtree.scoring.lm_head import Handed


def pack_batches(model: Any, temperature: float | None = None) -> Any:
    """Makes a model compute each distinct token of a THD batch once.

    The caller sends what it sent before, `packed_seq_params` with qkv_format "thd", and gets what
    it got: logits of every token, or losses if it gives labels. Calls of another format run as
    before. The caller must give `input_ids` on every pipeline stage, because every stage packs for
    itself.

    Prefixes are shared within one micro-batch, so put sequences with a common prefix into one.

    Args:
        model: a GPTModel or HybridModel built from `tree_spec`, wrapped by Megatron's DDP or
            Float16Module or not; or a list of them (virtual stages), as the hooks of
            Megatron-Bridge and of trainers have it.
        temperature: with a number, a batch without labels gets float32 [1, tokens, 2] in the place
            of logits, which are divided by it: at each token of a sequence but its last, the
            natural log-probability of the next token and the entropy of its distribution. Elsewhere
            0. Default: None, logits.

    Returns:
        The same model or list.

    Raises:
        UnsupportedError: a model or a setting with which forests are not exact, with the reason. A
            later forward raises it too: with the trainer's own `output_processor`, a
            `decoder_input`, parts of a batch for context parallelism, or without `input_ids`.
    """
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        language_model = find_model(chunk)
        check_model(language_model)
        _check_whole(language_model)
        if not _is_shared(language_model):
            with changing(language_model) as changes:
                packing = _BatchPacking(language_model, temperature)
                before = language_model.register_forward_pre_hook
                changes.hook(before, packing.pack, with_kwargs=True)
                behind = language_model.register_forward_hook
                changes.hook(behind, packing.end, always_call=True)
                changes.keep()
    return model


def _is_shared(language_model: Any) -> bool:
    hooks = language_model._forward_pre_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), _BatchPacking) for hook in hooks)


class _BatchPacking:
    """The hooks of one model, and their state during a forward."""

    def __init__(self, language_model: Any, temperature: float | None) -> None:
        self._temperature = temperature
        # the scores from the output layer, and the one that each token of the batch copies
        self._scored: tuple[Handed, GatherIndex] | None = None
        self._copies: GatherIndex | None = None
        self._copied = False
        self._open = ExitStack()
        self._calls: Callable[[], tuple[int, int]] | None = None
        self._tokens: RoutedTokens | None = None
        group = language_model.pg_collection.tp
        # its tensor-parallel ranks divide tokens
        self._group = group if language_model.config.sequence_parallel else None

    def pack(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replaces the arguments of a THD batch by those of its forest."""
        self._reset()
        signature = inspect.signature(model.forward)
        if "packed_seq_params" not in signature.parameters:
            # one that a trainer put there, which passes everything on
            signature = inspect.signature(type(model).forward.__get__(model))
        inputs = dict(signature.bind(*args, **kwargs).arguments)
        params = inputs.get("packed_seq_params")
        if params is None or isinstance(params, ForestParams) or params.qkv_format != "thd":
            return None
        check_model(model)
        _check_whole(model)
        check_no_replay(model)
        _check_call(inputs, params)
        packed, rows, spans = _forest_of(model, inputs["input_ids"], params)
        self._copies = GatherIndex(rows, packed.num_tokens, packed.device)
        local = LocalForest(packed)
        self._tokens = routed_tokens(model, local)
        if self._tokens is not None and inputs.get("padding_mask") is not None:
            counts = _counted(packed, rows, inputs["padding_mask"])
            self._tokens.copies = torch.from_numpy(counts).to(packed.device)
            self._tokens.is_dummy = not counts.any()
        self._calls = self._open.enter_context(counted_calls(packed.mask.host))
        if model.post_process and self._temperature is not None and inputs.get("labels") is None:
            check_head(model)
            scored = find_edges(packed, self._temperature, None)
            edges, _ = local.edges(scored)
            options = ScoreOptions(True)
            handed = self._open.enter_context(scoring_layer(model.output_layer, edges, options))
            # a sequence's scores stand before its tokens
            copies = np.full(len(rows), -1, np.int32)
            if spans:
                places = np.concatenate([np.arange(s, s + n - 1) for s, n in spans])
                copies[places] = scored.of_copies
            self._scored = handed, GatherIndex(copies, scored.count, packed.device)
        elif model.post_process:
            # looked up in each forward: trainers put value heads there
            changes = self._open.enter_context(changing(model.output_layer))
            changes.hook(model.output_layer.register_forward_pre_hook, self._copy_out)
        inputs |= {
            "input_ids": local.input_ids,
            "position_ids": local.position_ids[None],
            "attention_mask": None,
            "packed_seq_params": ForestParams.of(local),
            "padding_mask": None if self._tokens is None else self._tokens.as_mask(),
        }
        return (), inputs

    def _copy_out(self, layer: Any, args: tuple[Any, ...]) -> Any:
        """Copies hidden states [T, 1, d] to [R, 1, d]; parts of both under sequence parallelism."""
        assert self._copies is not None
        self._copied = True
        hidden = args[0]
        if self._group is not None:
            # every rank copies the whole, so its gradient is whole
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self._group
            )
        hidden = gather(hidden, self._copies)
        if self._group is not None:
            hidden = scatter_to_sequence_parallel_region(hidden, group=self._group)
        return (hidden, *args[1:])

    def end(self, model: Any, args: Any, output: Any) -> Any:
        """Checks that all layers ran; gives the scores of the batch's tokens if they are wanted."""
        calls, copied, tokens, scored = self._calls, self._copied, self._tokens, self._scored
        counted = (0, 0) if calls is None else calls()
        self._reset()
        # without an output an exception is being raised, which must not be hidden
        if calls is None or output is None:
            return None
        check_calls(model, counted, tokens)
        if scored is not None:
            return gather(returned_scores(output, scored[0]), scored[1])[None]
        if model.post_process and not copied:
            raise UnsupportedError(
                "the model did not call its output layer while its batch was shared (a trainer's "
                "fused head, or a patched forward): its results would have a row per distinct "
                "token; switch that off, or leave pack_batches out"
            )
        return None

    def _reset(self) -> None:
        self._copies, self._copied, self._calls, self._tokens = None, False, None, None
        self._scored = None
        self._open.close()


def _check_whole(language_model: Any) -> None:
    if (size := language_model.config.context_parallel_size) > 1:
        raise UnsupportedError(
            f"pack_batches is not served with context_parallel_size={size}: ranks get parts of "
            "sequences; use tree_logprobs, or set it to 1"
        )


def _check_call(inputs: dict[str, Any], params: Any) -> None:
    """Refuses calls in which the rows of the batch mean something else."""
    refused = {
        "output_processor": "a trainer's own output processor takes hidden states of distinct "
        "tokens for those of its batch; switch it off (fused heads, say), or leave out "
        "pack_batches",
        "decoder_input": "embeddings that were made outside of the model have a row per token of "
        "the batch; let the model embed input_ids",
        "inference_context": "caches of inference hold a row per token of the batch; generate "
        "with a model that is not shared",
        "inference_params": "caches of inference hold a row per token of the batch; generate with "
        "a model that is not shared",
        "extra_block_kwargs": "what else the layers are given may have a row per token of the "
        "batch; leave it out",
    }
    for name, reason in refused.items():
        if inputs.get(name) is not None:
            raise UnsupportedError(f"pack_batches is not served together with {name}: {reason}")
    if getattr(params, "local_cp_size", None) not in (None, 1):
        raise UnsupportedError(
            f"pack_batches is not served with local_cp_size={params.local_cp_size}: ranks would "
            "hold parts of a forest; set it to 1"
        )
    ids = inputs.get("input_ids")
    if ids is None or ids.is_nested or ids.ndim != 2 or ids.shape[0] != 1:
        got = "None" if ids is None else f"{'nested' if ids.is_nested else list(ids.shape)}"
        raise UnsupportedError(
            "pack_batches needs input_ids [1, tokens] of the THD batch on every stage of the "
            f"pipeline, got {got}"
        )


def _forest_of(
    model: Any, ids: torch.Tensor, params: Any
) -> tuple[PackedForest, np.ndarray, list[tuple[int, int]]]:
    """Packs ids [1, R] into a forest.

    Gives also its row for each token, int32 [R], -1 for tokens of no sequence; and (begin, length)
    of each sequence.
    """
    ends = params.cu_seqlens_q
    padded = getattr(params, "cu_seqlens_q_padded", None)
    starts = ends if padded is None else padded
    # waits for the device once
    parts = [x.reshape(-1).long() for x in (starts, ends, ids)]
    host = torch.cat(parts).cpu().split([len(x) for x in parts])
    starts, ends, tokens = (x.numpy() for x in host)
    lengths = np.diff(ends)
    if len(starts) != len(ends) or (starts[:-1] + lengths > ids.shape[1]).any():
        raise UnsupportedError(
            f"pack_batches got input_ids of {ids.shape[1]} tokens and sequences that end at "
            f"{int((starts[:-1] + lengths).max())}: every pipeline stage needs the whole batch"
        )
    spans = zip(starts[:-1].tolist(), lengths.tolist(), strict=True)
    chosen = [(start, length) for start, length in spans if length > 0]
    forest = PrefixForest.from_sequences([tokens[s : s + n] for s, n in chosen] or [tokens[:1]])
    if not chosen:
        # a batch of padding alone
        forest = forest.dummy()
    config = model.config
    size = config.tensor_model_parallel_size if config.sequence_parallel else None
    packed = pack(forest, pad_to_multiple_of=size).to(ids.device)
    rows, _ = packed.copy_index(np.arange(forest.num_sequences))
    # tokens between and after sequences read zeros
    copies = np.full(ids.shape[1], -1, np.int32)
    if chosen:
        copies[np.concatenate([np.arange(s, s + n) for s, n in chosen])] = rows
    return packed, copies, chosen


def _counted(packed: PackedForest, rows: np.ndarray, padding: torch.Tensor) -> np.ndarray:
    """Counts packed tokens in the batch, int64 [T], without the caller's padding_mask [1, R]."""
    counted = ~padding.reshape(-1).cpu().numpy().astype(bool) & (rows >= 0)
    return np.bincount(rows[counted], minlength=packed.num_tokens)
