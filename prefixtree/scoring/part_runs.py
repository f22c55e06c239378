"""`PartRuns`: parts of a forest, and dummies, through a model that may be wrapped.

Legend: U units that get a row (edges, or tokens), t own tokens of a part.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from prefixtree.models.changes import ModelStamp, changing
from prefixtree.models.checks import warn_of_hooks
from prefixtree.models.families import forward_inputs
from prefixtree.packing.layout import PackedForest, pack
from prefixtree.parallel.ledger import CellExchanges, Divided
from prefixtree.parallel.run import Rows
from prefixtree.parallel.states import part_mask
from prefixtree.recompute.trunk_modes import Asked, PartModes
from prefixtree.scoring.edges import ScoredUnits
from prefixtree.scoring.in_groups import of_tokens, part_inputs
from prefixtree.scoring.local import PartCall


class PartForward(Asked, Protocol):
    """Calls a model over parts of a forest: what differs between scores and values.

    Attributes:
        packed: the forest, with the token ids that the model knows.
        inputs: keywords of a forward over the whole forest.
    """

    packed: PackedForest
    inputs: dict[str, Any]

    @property
    def units(self) -> ScoredUnits:
        """The edges or tokens that get a row."""

    def __call__(self, part: PartCall) -> Rows:
        """Runs a part: [u, columns], then [t, ...] each, as many of them in every call."""


class PartRuns:
    """Runs the parts of a forest through a model, one by one, for `Run`.

    Args:
        divided: the cells of this process; None where all parts are dummies.
        scored: per part, the units whose rows it gives, and the own tokens that give them.
        trains: whether there are backwards.
        inputs_of: the caller's name for the owner of the forward's inputs, for messages.
    """

    def __init__(
        self,
        model: nn.Module,
        transformer: Any,
        forward: PartForward,
        divided: Divided | None,
        scored: Sequence[tuple[np.ndarray, np.ndarray]],
        modes: PartModes,
        trains: bool,
        inputs_of: str,
    ) -> None:
        self._model, self._transformer, self._forward = model, transformer, forward
        self._divided, self.scored, self._modes = divided, scored, modes
        self.wrapped = Wrapped(model, forward.packed.device)
        self._stamp: ModelStamp | None = None
        if trains:
            # what layers that are recomputed read
            read = {
                inputs_of.format(name) + ", or what shares its memory,": x
                for name, _, x in of_tokens(forward.inputs)
            }
            for wing in forward.wings.values():
                read |= wing.read()
            self._stamp = ModelStamp(model, read, for_backward=True)

    def __call__(self, part: int, exchanges: CellExchanges | None, is_last: bool) -> Rows:
        with self.wrapped.as_in_the_forward(is_last):
            if exchanges is None or self._divided is None:
                # none of its tokens is scored
                dummy, nothing = dummy_of(self._forward.packed), np.empty(0, np.int64)
                inputs = forward_inputs(dummy, self._transformer)
                nothings = nothing, nothing, nothing
                return self._forward(PartCall(dummy.mask, inputs, *nothings, self._modes.of_dummy))
            mask = part_mask(exchanges, self._divided.by_heads)
            inputs = part_inputs(self._forward.inputs, mask.part, mask)
            scored, mode = self.scored[part], self._modes.of_part[part]
            own = mask.part.own_tokens
            return self._forward(PartCall(mask.attended, inputs, *scored, own, mode))

    def settle(self, runs: str) -> None:
        """Ends the first forward: from here on the model may not change.

        Args:
            runs: what calls the model several times, for a warning of its hooks.
        """
        if self._stamp is not None:
            self._stamp.settle()
            warn_of_hooks(self._model, runs)

    def change(self) -> str | None:
        """Says what changed in the model since then; None where nothing did."""
        return None if self._stamp is None else self._stamp.change()


def dummy_of(packed: PackedForest) -> PackedForest:
    """Makes a dummy, which a rank runs while others have a part more."""
    return pack(packed.forest.dummy()).to(packed.device)


class Wrapped:
    """Gives each part the autocast of the forward, and DDP's synchronisation to the last alone.

    The gradients of all parts but the last stay local under DDP. FSDP reduces those of every part
    where it is set to: a whole gradient that waits would take the memory of all its shards.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._type = model, device.type
        self._autocast = (
            torch.get_autocast_dtype(device.type),
            torch.is_autocast_enabled(device.type),
            torch.is_autocast_cache_enabled(),
        )
        self.synchronise_as_now()

    def synchronise_as_now(self) -> None:
        """Lets the last part synchronise if DDP now does: not within no_sync."""
        ddp = [m for m in self._model.modules() if isinstance(m, DistributedDataParallel)]
        self._ddp = [(module, module.require_backward_grad_sync) for module in ddp]

    @property
    def synchronises(self) -> bool:
        """Whether DDP averages gradients of the last part."""
        return any(synchronises for _, synchronises in self._ddp)

    @contextmanager
    def as_in_the_forward(self, is_last: bool) -> Iterator[None]:
        """A context for every forward of a part."""
        autocast = torch.autocast(self._type, *self._autocast)
        if not torch.is_grad_enabled():
            with autocast, warnings.catch_warnings():
                # reentrant checkpointing, which has nothing to recompute here
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
                yield
            return
        with changing(self._model) as changes, autocast:
            for module, synchronises in self._ddp:
                changes.set(module, require_backward_grad_sync=synchronises and is_last)
            yield
