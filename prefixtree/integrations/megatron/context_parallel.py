"""`LocalForest`: the tokens of a packed forest that this rank computes, and `ForestParams`, which
stands for it in the place of `packed_seq_params`.

The ranks of Megatron's context-parallel group divide the packed tokens as `group=` does for
transformers' models. Core attention imports the keys and values of ancestors from other ranks, for
the heads of this tensor-parallel rank. A layer with a state exchanges tokens for some of these
heads.

**Gradients.** Megatron's schedules multiply a loss by the size of the group, and its DDP divides
gradients by it: each rank is taken to have a part of the loss. Here every rank has the scores of
all tokens and computes the whole loss. So the gradient of a score is the mean over ranks, and a
trainer's loss stays as it is without context parallelism.

Legend: T packed tokens, t tokens of this rank, U scored edges, n ranks of the group, P positions, D
rotary dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.attention import tree_attention
from prefixtree.packing.copies import GatherIndex
from prefixtree.packing.layout import PackedForest
from prefixtree.parallel.agreement import agree
from prefixtree.parallel.ledger import Divided
from prefixtree.parallel.ranks import arrival
from prefixtree.parallel.states import LayerStates, part_mask
from prefixtree.planning.split import Split, split_tokens
from prefixtree.scoring.edges import DeviceEdges, ScoredEdges, edges_on_device
from prefixtree.scoring.group_facts import FACTS, WINGS, parts_of_forest, parts_of_scores
from prefixtree.scoring.group_refusals import check_backend_of_parts
from prefixtree.scoring.in_groups import (
    edges_of,
    edges_of_part,
    gathering,
    padded_to_ranks,
)
from prefixtree.states.protocol import KeepsStates, WholeForest


class LocalForest:
    """A packed forest, or this rank's part of it.

    Args:
        split: its division among the ranks of `group`. Default: this rank has all.

    Attributes:
        packed: the whole forest.
        mask: the TreeMask over which the layers of this rank attend.
        input_ids, position_ids: int64 [1, t], and int64 [t], depths.
        copies: int32 [t], how often the replicated batch has each token; 0 for padding.
        routes: None, or integers [t, layers, k], the recorded experts of each token.
        states: the calls of layers with a state.
    """

    def __init__(self, packed: PackedForest, split: Split | None = None, group: Any = None) -> None:
        self.packed, self._split, self._group = packed, split, group
        inputs = packed.model_inputs()
        ids, self.position_ids = inputs["input_ids"][0], packed.position_ids
        self.routes = inputs.get("tree_routes")
        self.mask, self.copies = packed.mask, packed.multiplicity
        self._divided: Any = None
        self.states: KeepsStates = WholeForest(self.mask)
        if split is not None:
            self._index = torch.distributed.get_rank(group)
            self._part = split[self._index]
            self.mask = self._part.mask
            exchanges = Divided.of_group(split, self._index, group).at_once()
            self._divided = part_mask(exchanges)
            self.states = LayerStates(exchanges, self)
            ids, self.position_ids, self.copies = (
                self._part.own(x) for x in (ids, self.position_ids, self.copies)
            )
            if self.routes is not None:
                self.routes = self._part.own(self.routes)
        self.input_ids = ids[None]

    @property
    def is_part(self) -> bool:
        """Whether other ranks have tokens too."""
        return self._split is not None

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Computes attention to paths: q [t, H, D], k [t, Hk, D], v [t, Hk, Dv] -> [t, H, Dv]."""
        if self._divided is None:
            return tree_attention(query, key, value, self.mask, **options)
        out: torch.Tensor = self._divided.attend(layer, query, key, value, **options)
        return out

    def edges(self, found: ScoredEdges) -> tuple[DeviceEdges, GatherIndex]:
        """Finds this rank's edges, and the gather from all ranks' scores [U, C] to sequences."""
        packed = self.packed
        if self._split is None:
            edges = edges_on_device(packed, found, None, found.predictor)
            return edges, GatherIndex(lambda: found.of_copies, found.count, packed.device)
        return edges_of_part(packed, self._split.owner, self._index, found)[:2]

    def gathered_scores(self, scores: torch.Tensor, found: ScoredEdges) -> torch.Tensor:
        """Gathers scores of this rank's edges to those of all ranks [U, C], rank by rank."""
        return scores if self._split is None else self._gathered(scores, found.predictor)

    def gathered_output(self, output: Any, num_tokens: int) -> Any:
        """Gathers a model's output [1, t, ...] to [1, num_tokens, ...] in packed order."""
        if self._split is None:
            return output
        rows = self._part.num_tokens
        if not isinstance(output, torch.Tensor) or output.shape[:2] != (1, rows):
            got = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
            raise UnsupportedError(
                f"the model returned {got}, expected [1, {rows}, ...], a row per token of this rank"
            )
        every = np.arange(self.packed.num_tokens)
        row = torch.from_numpy(arrival(self._split.owner, len(self._split))[0][:num_tokens])
        rows_of_all = self._gathered(output[0].flatten(1), every).index_select(
            0, row.to(output.device)
        )
        return rows_of_all.unflatten(1, output.shape[2:])[None]

    def _gathered(self, values: torch.Tensor, tokens: np.ndarray) -> torch.Tensor:
        """Gathers values [*, C] of all ranks, where the owner of tokens[i] has value i."""
        assert self._split is not None
        gathered = gathering(self._split.owner, self._index, self._group, tokens)(values)
        ranks = len(self._split)
        if gathered.requires_grad:
            gathered.register_hook(lambda gradient: gradient / ranks)
        return gathered


def local_forest(
    language_model: Any,
    packed: PackedForest,
    check: Callable[[], ScoredEdges | None],
    options: dict[str, Any],
) -> tuple[LocalForest, ScoredEdges | None]:
    """Makes this rank's tokens once all ranks agree; gives also the result of `check`.

    `check` must not communicate. `options` are those of the call, the same on all ranks.
    """
    config, group = language_model.config, language_model.pg_collection.cp
    ranks = group.size()
    if ranks == 1:
        return LocalForest(packed), check()

    def prepare() -> tuple[tuple[Split, ScoredEdges | None], dict[str, Any]]:
        scored = check()
        multi_latent = getattr(config, "multi_latent_attention", False)
        heads = config.num_attention_heads
        groups = heads if multi_latent else config.num_query_groups or heads
        check_backend_of_parts(packed, heads, groups)
        # sequence parallelism cuts each part again
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        padded = padded_to_ranks(packed, ranks * multiple)
        # depends on the configuration alone, as all stages of a pipeline divide alike
        split = split_tokens(padded, ranks, scored=edges_of(scored), multiple=multiple)
        _check_stages(config, split)
        runs = dict(zip(("starts of runs", "their owners"), split.runs, strict=True))
        return (split, scored), {
            "forest": parts_of_forest(packed),
            **parts_of_scores(scored),
            **{name: {} for name in WINGS},
            "model": {name: getattr(config, name, None) for name in _MODEL},
            "options": {**options, **_parts_of_state(language_model, packed)},
            "division": runs,
        }

    device = next(language_model.parameters()).device
    split, scored = agree(group, device, prepare, FACTS)
    return LocalForest(split.packed, split, group), scored


#: Fields of a configuration that decide what ranks exchange.
_MODEL = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("params_dtype", "sequence_parallel", "tensor_model_parallel_size"),
)


def _parts_of_state(language_model: Any, packed: PackedForest) -> dict[str, Any]:
    config = language_model.config
    return {
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "model.training": language_model.training,
        "backend of the packed forest": packed.mask.backend,
        "deterministic of the packed forest": packed.mask.deterministic,
        "recompute_granularity": config.recompute_granularity,
    }


def check_group(language_model: Any) -> None:
    """Refuses a model whose context-parallel group is not the one of its configuration."""
    size = language_model.config.context_parallel_size
    ranks = language_model.pg_collection.cp.size()
    if size != ranks:
        raise UnsupportedError(
            f"context_parallel_size={size} of the configuration, and the model's group has {ranks} "
            "ranks; give both the same size"
        )


def _check_stages(config: Any, split: Split) -> None:
    """Refuses parts of unequal size that a pipeline would send on as equal ones, without shapes."""
    tokens = split.num_own_tokens.tolist()
    sends = config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths
    if sends and len(set(tokens)) > 1:
        raise UnsupportedError(
            f"context-parallel ranks have {tokens} tokens, and pipeline stages take them for equal "
            "shares: set variable_seq_lengths=True, or pad the forest to a multiple of the ranks "
            "(pack(forest, pad_to_multiple_of=...))"
        )


class Alone:
    """A context-parallel group of one, so that ranks do not cut rotary tables: depths pick rows."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


# ---- a forest in the place of packed_seq_params --------------------------------------------------

# Megatron compares the format with "thd" alone, and everything else takes its unpacked code, which
# is what a forest needs. TransformerEngine's attention raises for a format it does not know, so a
# layer that the checks did not see cannot read the forest as one sequence
_FORMAT = "prefixtree"


@dataclass
class ForestParams(PackedSeqParams):
    """A packed forest, which Megatron's models hand to every layer of a stage.

    Megatron makes its rotary table for positions 0 .. max_seqlen - 1 and applies row i to token i;
    `at_depths` picks the rows of the tokens' positions.
    """

    local: LocalForest | None = None
    _rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)
    _latent: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, local: LocalForest) -> ForestParams:
        """Makes the parameters of one forward; every stage makes its own."""
        longest = int(local.packed.forest.sequence_lengths.max())
        return cls(qkv_format=_FORMAT, max_seqlen_q=longest, max_seqlen_kv=longest, local=local)

    def at_depths(self, table: Any) -> Any:
        """Picks the tokens' rows [t, 1, 1, D] of tables [P, 1, 1, D], row i for position i.

        None and tuples of tables are mapped too.
        """
        if table is None:
            return None
        if isinstance(table, tuple):
            return tuple(self.at_depths(t) for t in table)
        assert self.local is not None
        if id(table) not in self._rows:
            if len(table) < int(self.max_seqlen_q):
                raise RuntimeError(
                    f"a rotary table has {len(table)} rows, and the longest sequence "
                    f"{self.max_seqlen_q} tokens: something cut it for context parallelism"
                )
            # the table too, so that its id stays its own
            self._rows[id(table)] = table, table.index_select(0, self.local.position_ids)
        return self._rows[id(table)][1]

    def latent_rows(self, make: Callable[[], Any]) -> Any:
        """The tokens' rows of latent attention's rotary table, made once for all layers."""
        if self._latent is None:
            table = make()
            pair = isinstance(table, tuple)
            self._latent = (self.at_depths(table[0]), *table[1:]) if pair else self.at_depths(table)
        return self._latent
