"""`CachedForward`: forwards of a model over a growing forest, and refusals of models that no such
forward serves. `StepGraphs`: when CUDA graphs of decode steps are captured and replayed.

A captured step is a list of kernels and of the addresses that they read and write. All that Python
decided during the capture stays decided.

Legend: B new tokens, V vocabulary.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from prefixtree.errors import ForestError, UnsupportedError, kind_of
from prefixtree.forest import PrefixForest
from prefixtree.models.changes import OF_CHECKPOINTING, ModelStamp, asks_for_gradients
from prefixtree.models.checks import (
    attention_modules,
    check_loaded,
    check_model,
    check_parts,
    check_positions,
    check_vocabulary,
    every_layer_attends,
    find_causal_lm,
)
from prefixtree.models.families import check_tokens, family_of, forward_inputs, seed_of
from prefixtree.models.prepared import prepare_layers
from prefixtree.models.rope import fixed_lengths, longest_row
from prefixtree.models.rows_alone import check_layers
from prefixtree.packing.layout import PackedForest
from prefixtree.sampling.forest_cache import ForestCache
from prefixtree.sparse.masks import not_kept

# ---- CUDA graphs of decode steps -----------------------------------------------------------------

# uncaptured steps before a capture: kernels are compiled in the first, and the
# second is watched
_WARM = 2
# transformers looks for packed sequences in position_ids there, and not while a graph is captured
_NOT_WHEN_CAPTURED = "masking_utils.py"


class StepGraphs:
    """Captures steps on a device as CUDA graphs, which share one pool of memory.

    One runs at a time, and its results are in tensors made before, so graphs may share.

    Attributes:
        num_captured: the number of captured steps.
        reason: why steps are not captured; None if they are.
    """

    def __init__(self, device: torch.device, wanted: bool = True) -> None:
        self.num_captured = 0
        self.reason: str | None = None
        if not wanted or device.type != "cuda":
            self.reason = "the device has no CUDA graphs" if wanted else "graphs=False"
            return
        self._stream = _stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def size_of(self, rows: int) -> int:
        """Rounds rows up to a step's size, by a quarter at most, where steps are captured."""
        if self.reason is not None:
            return rows
        step = max(8, 1 << max(0, (rows - 1).bit_length() - 3))
        return -(-rows // step) * step

    def captured(self) -> Callable[[Callable[[], None]], None]:
        """Makes a runner of one step, which runs it plainly at first, then captures and replays it.

        The step reads and writes tensors that stay where they are, and is the same at every call.
        The runner does not keep it, so no circle of references keeps its tensors.
        """
        calls, replay = 0, None

        def run(step: Callable[[], None]) -> None:
            nonlocal calls, replay
            calls += 1
            if self.reason is not None or torch.is_autocast_enabled("cuda"):
                # an autocast around the call keeps cast weights that a graph would read later
                step()
            elif replay is not None:
                replay()
            elif calls < _WARM:
                self._beside(step)
            elif calls == _WARM:
                self._watch(step)
            else:
                replay = self._capture(step)
                self.num_captured += 1
                replay()

        return run

    def _watch(self, step: Callable[[], None]) -> None:
        """Runs a step and notes whether it waits for the device, which no graph can."""
        if places := self._waits(step):
            self.reason = f"{', '.join(sorted(places))} waits for the GPU"
            warnings.warn(
                f"decode steps of this model are not captured in a CUDA graph, because "
                f"{self.reason}; every step launches its kernels one by one, which is slower. "
                "TreeSampler(graphs=False) does so without this warning",
                stacklevel=2,
            )

    # ---- CUDA ------------------------------------------------------------------------------------

    def _beside(self, step: Callable[[], None]) -> None:
        """Runs a step on the stream of the captures, so that libraries have their memory for it."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)

    def _waits(self, step: Callable[[], None]) -> set[str]:
        """Runs a step, and finds the places in Python where it waited for the device."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                torch.cuda.set_sync_debug_mode("warn")
                self._beside(step)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        files = [(Path(w.filename), w) for w in seen if "synchronizing CUDA op" in str(w.message)]
        return {
            f"{file.parent.name}/{file.name}:{w.lineno}"
            for file, w in files
            if file.name != _NOT_WHEN_CAPTURED
        }

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # other threads, such as those that fetch data, may go on meanwhile
        options: dict[str, Any] = {"capture_error_mode": "thread_local", "stream": self._stream}
        with torch.cuda.graph(graph, pool=self._pool, **options):
            step()
        return lambda: graph.replay()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream for all samplers, as cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream(device)


def state_of(model: nn.Module, addresses: list[int]) -> int:
    """Hashes all that a captured step of a model depends on, but for the contents of tensors.

    These are addresses of parameters, buffers and others given, the modules, their hooks and plain
    attributes (which adapter is active, whether it is merged, its scaling), and the configuration.
    """
    config: Any = model.config
    facts = [_facts(vars(part)) for part in (*model.modules(), config, config.get_text_config())]
    return hash((tuple(facts), tuple(addresses)))


def _facts(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, dict):
        return tuple(
            (key, _facts(one))
            for key, one in value.items()
            # hooks are kept by number
            if key not in OF_CHECKPOINTING and not (type(key) is int and asks_for_gradients(one))
        )
    if isinstance(value, (list, tuple)):
        return tuple(map(_facts, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return id(value)


# ---- forwards over a growing forest --------------------------------------------------------------

# compared numbers per parameter: an update in bfloat16 leaves most as they were
_SEEN = 64


class CachedForward:
    """Calls a causal language model with one `ForestCache` of `capacity` keys."""

    def __init__(self, model: nn.Module, capacity: int) -> None:
        self.cache = ForestCache(capacity)
        self._model = model
        # adapters are inside of the causal LM; wrappers of training (DDP) are not called
        self._causal_lm = find_causal_lm(model)
        config = self._causal_lm.config
        if family_of(config.get_text_config()).has_indexers:
            raise not_kept()
        self._position_rows = family_of(config).position_rows
        self.has_states = bool(family_of(config.get_text_config()).functions)
        self._keywords: dict[str, Any] = {"use_cache": False, "forest_cache": self.cache}
        if getattr(config.get_text_config(), "output_router_logits", False):
            # sampling needs no load-balancing loss
            self._keywords["output_router_logits"] = False
        self._rope_length: int | None = None
        self._owner: weakref.ref[Any] | None = None
        self._stamp: ModelStamp | None = None
        self._numbers = b""

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self._causal_lm.parameters()).device

    @property
    def reads_lengths(self) -> bool:
        """Whether a forward looks at the values of positions, which a CUDA graph cannot."""
        return bool(fixed_lengths(self._causal_lm.config.get_text_config()))

    @property
    def state(self) -> int:
        """The `state_of` the model and the pools."""
        return state_of(self._causal_lm, self.cache.addresses)

    def prefill(self, packed: PackedForest, last: np.ndarray, slots: np.ndarray) -> torch.Tensor:
        """Reads a packed forest; gives the logits [S, V] of tokens `last`, int64 [S].

        Their states go into `slots`, int64 [S]. Raises MemoryError if there is no room for them.
        """
        check_model(self._model, self._causal_lm, packed)
        self._check_dropout()
        self._rope_length = longest_row(self._causal_lm, packed.mask.host)
        prepare_layers(self._causal_lm)
        check_layers(self._causal_lm, self._causal_lm, packed.device)
        self._stamp, self._numbers = ModelStamp(self._causal_lm), self._some_numbers()
        self.cache.begin_prefill()
        if self.has_states:
            self.cache.states.begin_prefill(packed.mask, last, slots)
        inputs = forward_inputs(packed, self._causal_lm)
        with every_layer_attends(self._causal_lm, packed.mask):
            of_last = torch.from_numpy(last).to(self.device)
            logits = self._eager(**inputs, logits_to_keep=of_last)
        self._stamp.settle()
        return logits

    def step(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Reads ids int64 [B] at positions int64 [B]; gives the logits [B, V]."""
        return self._call(**self._inputs(ids, positions))

    def read(
        self,
        runs: np.ndarray,
        tails: np.ndarray,
        slots: tuple[np.ndarray, np.ndarray],
        tokens: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Reads several tokens per row; gives the logits [rows, V] of the last of each."""
        self.cache.resume(self.cache.works(runs, tails))
        self.cache.states.read(np.array([len(row) for row in tokens]), *slots)
        ids = torch.tensor([token for row in tokens for token in row], device=self.device)
        # position of the first key of a row's own run, plus the keys written after it
        position_ids = torch.from_numpy(tails[:, 3] + tails[:, 2]).to(self.device)
        last = np.cumsum([len(row) for row in tokens]) - 1
        logits = self._call(**self._inputs(ids, position_ids))
        return logits[torch.from_numpy(last).to(self.device)]

    def _inputs(self, ids: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        position_ids = positions[None]
        if self._position_rows > 1:
            position_ids = position_ids.expand(self._position_rows, 1, -1)
        return {"input_ids": ids[None], "position_ids": position_ids}

    def _eager(self, **inputs: Any) -> torch.Tensor:
        # once per call of `start`: not worth a compilation
        with torch.compiler.set_stance("force_eager"):
            return self._call(**inputs)

    @torch.no_grad()
    def _call(self, **inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = self._causal_lm(**{**inputs, **self._keywords}).logits[0]
        self.cache.end()
        return logits

    # ---- checks ----------------------------------------------------------------------------------

    def check_forest(self, forest: PrefixForest) -> None:
        """Refuses a forest that cannot be sampled from, before anything is computed."""
        if not isinstance(forest, PrefixForest):
            raise TypeError(
                f"start takes a PrefixForest, got {kind_of(forest, PrefixForest)}; "
                "PrefixForest.from_sequences(histories) makes one"
            )
        if forest.tokens is None:
            raise ForestError("this forest has no token ids; give from_parents its tokens=")
        if forest.routes is not None:
            raise UnsupportedError(
                "the forest has recorded routes, and sampled tokens would have none: make it "
                "without routes="
            )
        self.check_tokens(forest.tokens)
        attention_modules(self._causal_lm)
        parts = *self._model.named_modules(), *self._causal_lm.named_parameters()
        kinds = FSDPModule, FullyShardedDataParallel, DTensor
        # ZeRO-3 leaves parameters empty
        sharded = [
            name
            for name, part in parts
            if isinstance(part, kinds) or (isinstance(part, nn.Parameter) and part.numel() == 0)
        ]
        if sharded:
            raise UnsupportedError(
                f"the parameters are sharded over ranks ({sharded[0] or 'the model'}: FSDP, "
                "ZeRO-3 or tensor parallelism), and each rank would have to take the same steps: "
                "gather them first, as TRL's unwrap_model_for_generation does, or sample with a "
                "copy of the model"
            )

        devices = sorted({str(p.device) for p in self._causal_lm.parameters()})
        if len(devices) > 1:
            raise UnsupportedError(
                f"the parameters are on {', '.join(devices)}, and keys are kept on one device: "
                "load the model on one device, without device_map"
            )
        check_loaded(self._causal_lm)

    def check_tokens(self, tokens: np.ndarray) -> None:
        """Refuses token ids that the model does not have, and warns of ids of images."""
        check_tokens(self._causal_lm.config, tokens, sees=False)
        check_vocabulary(self._causal_lm, tokens)

    def check_length(self, longest: int) -> None:
        """Refuses rows longer than learned positions, or one set of RoPE's frequencies."""
        check_positions(self._causal_lm, longest, "max_new_tokens counted")
        if self._rope_length is not None and longest > self._rope_length:
            raise UnsupportedError(
                f"RoPE has other frequencies for sequences of more than {self._rope_length} "
                f"tokens, and rows may come to have {longest}, beside keys that were rotated by "
                "these: lower max_new_tokens, or sample with model.generate"
            )

    def own(self, rows: Any) -> None:
        """Notes whose rows' keys and states the cache holds from now on."""
        # weak, so that a sampler's memory is free as soon as nobody has it or its rows
        self._owner = None if rows is None else weakref.ref(rows)

    def check_owner(self, rows: Any) -> None:
        """Raises a RuntimeError for rows whose keys are gone."""
        if self._owner is None or self._owner() is not rows:
            raise RuntimeError(
                "the keys of these rows are gone: the sampler started anew, or was interrupted "
                "while it moved keys or branched rows, or while recurrent layers read tokens; "
                "rows.samples() still has what was sampled"
            )

    def check_model(self) -> None:
        """Refuses a model that has changed since: weights, dropout, noise or adapters."""
        assert self._stamp is not None
        change = self._stamp.change()
        if change is None and self._numbers != self._some_numbers():
            change = "numbers of the parameters changed"
        if change is not None:
            raise RuntimeError(
                f"the model's weights or adapters changed since the sampler started ({change}), so "
                "its keys are of other weights: call sampler.start again"
            )
        check_parts(self._model, self._causal_lm)
        self._check_dropout()

    def _check_dropout(self) -> None:
        if seed_of(self._causal_lm) is not None:
            raise UnsupportedError(
                "shared dropout is not verified in sampling, as single tokens have no masks: call "
                "model.eval() while it samples"
            )

    @torch.no_grad()
    def _some_numbers(self) -> bytes:
        """The first numbers of all parameters: writes to `.data` leave no other trace."""
        # by name: PEFT's forwards change the order of parameters that `target_parameters` names
        named = sorted(self._causal_lm.named_parameters())
        numbers = torch.cat([p.flatten()[:_SEEN].float() for _, p in named])
        return numbers.cpu().numpy().tobytes()
