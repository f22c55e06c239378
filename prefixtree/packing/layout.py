"""`pack`: a forest laid out as one sequence of distinct tokens, and the way back to sequences.

Legend: S sequences, T packed tokens (padding included), R replicated tokens, E scored edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch

from prefixtree import loops
from prefixtree._numbers import (
    check_unmasked,
    check_without_gradient,
    entries,
    integer,
    integers,
    number,
)
from prefixtree.errors import ForestError, UnsupportedError, kind_of, with_hints
from prefixtree.forest import PrefixForest
from prefixtree.packing.copies import GatherIndex, check_device, gather, lasting, move
from prefixtree.packing.mask import TreeMask
from prefixtree.packing.per_sequence import check_lengths, flat_selection, per_sequence


class NoLabels:
    """Stands in for `num_items_in_batch`, by which a model divides its loss."""

    # transformers hands that keyword only to the loss, and the loss reads it only if there are
    # labels; without labels nothing touches the object: compiled code, checkpoints and wrappers
    # pass it on; `shift_labels` would be read first, but its mere presence makes Liger Kernel's
    # forward compute a loss

    def __rtruediv__(self, loss: Any) -> NoReturn:
        raise UnsupportedError(LABELS)


LABELS = (
    "labels= (or num_items_in_batch=) asks the model to compute the loss. It would take the "
    "packed tokens for one sequence: wrong after every branch, with a shared token counted once. "
    "Leave both out and compute the loss from prefixtree.sequence_logprobs(model, packed).logprobs"
)


class Edges(NamedTuple):
    """Scored edges: the model's output at `predictor` scores the token at `token`.

    Attributes:
        predictor: int64 [E], packed index of the token before the scored one on its path.
        token: int64 [E], packed index of the scored token; ascending.
    """

    predictor: torch.Tensor
    token: torch.Tensor


class _Columns(NamedTuple):
    """Values per packed token, [T] each: two int64, then four int32, all views of one buffer."""

    token: Any
    position: Any
    subtree_end: Any
    predictor: Any
    multiplicity: Any
    narrow_position: Any


# int32 words of the buffer per token
_WORDS = 2 * 2 + 4


def _columns(buffer: Any) -> _Columns:
    """Views a buffer int32 [_WORDS * T], a numpy array or a torch tensor, as columns."""
    num_tokens = len(buffer) // _WORDS
    int64: Any = torch.int64 if isinstance(buffer, torch.Tensor) else np.int64
    wide = buffer[: 4 * num_tokens].view(int64)
    narrow = buffer[4 * num_tokens :].reshape(4, num_tokens)
    return _Columns(wide[:num_tokens], wide[num_tokens:], *(narrow[i] for i in range(4)))


# what people look for on a packed forest
_NO_DTYPE = "its numbers are integers whatever the model computes in"
_MENDS = {
    "cuda": '.to("cuda") copies it there',
    "cpu": '.to("cpu") copies it there',
    **dict.fromkeys(("half", "float", "bfloat16", "dtype"), _NO_DTYPE),
    "tokens": "packed ones are .input_ids, those of sequence i .forest.path(i)",
    "attention_mask": "what a token sees is in .mask, which models take as tree_mask=",
    "shape": "it has num_tokens and forest.num_sequences",
}


class PackedForest:
    """A forest's distinct tokens, each once, in preorder, on one device. `pack` makes it.

    Attributes:
        forest: the PrefixForest.
        input_ids: int64 [T] token ids, or None if the forest has none.
        position_ids: int64 [T], each token's position in its sequences.
        subtree_end: int32 [T], one past the last packed token below each token.
        predictor: int32 [T], the token before each on its path; -1 at roots and padding.
        multiplicity: int32 [T], how many sequences hold each token; 0 for padding and in a dummy.
        mask: the TreeMask, which `tree_attention` takes.
    """

    @lasting
    def __init__(self, forest: PrefixForest, buffer: torch.Tensor, mask: TreeMask) -> None:
        self.forest = forest
        self._buffer = buffer
        columns = _columns(buffer)
        self.input_ids = columns.token if forest.tokens is not None else None
        self.position_ids = columns.position
        if not mask.host.is_subset:
            mask.host.shortest = int(forest.sequence_lengths.min())
        self.mask = mask.given_with(self.position_ids)
        self.subtree_end = columns.subtree_end
        self.predictor = columns.predictor
        self.multiplicity = columns.multiplicity

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._buffer.device

    @property
    def num_tokens(self) -> int:
        """T, the number of packed tokens, padding included."""
        return self.mask.num_tokens

    @property
    def num_padding(self) -> int:
        """The number of padding tokens, which stand at the end."""
        return self.num_tokens - self.forest.num_tokens

    def to(self, device: torch.device | str) -> PackedForest:
        """Copies the packed forest to a device, asynchronously to CUDA; host tables are shared."""
        check_device(device)
        buffer = move(self._buffer, device)
        columns = _columns(buffer)
        mask = self.mask.adopt(columns.subtree_end, columns.narrow_position)
        return PackedForest(self.forest, buffer, mask)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            mend = _MENDS.get(name)
            mend = f"; {mend}" if mend else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{mend}")

    def with_options(
        self, backend: str | None = None, deterministic: bool | None = None
    ) -> PackedForest:
        """Changes the options of the mask; None leaves one unchanged. Tensors are shared.

        Args:
            backend: as in `tree_attention`.
            deterministic: whether gradients are bitwise repeatable.
        """
        return PackedForest(
            self.forest, self._buffer, self.mask.with_options(backend, deterministic)
        )

    def with_input_ids(self, input_ids: torch.Tensor) -> PackedForest:
        """Gives the packed tokens other ids for the model; the forest keeps its own.

        Args:
            input_ids: integers [T], a tensor.

        Returns:
            A PackedForest with these `input_ids` and this one's `forest`.

        Raises:
            TypeError: anything but a tensor.
            ForestError: another shape or dtype, or a forest without token ids.
        """
        if not isinstance(input_ids, torch.Tensor):
            raise TypeError(f"input_ids must be a torch tensor, got {type(input_ids).__name__}")
        # copying would broadcast one number, and cut fractions off
        wide = input_ids.dtype.is_floating_point or input_ids.dtype.is_complex
        if input_ids.shape != (self.num_tokens,) or wide or input_ids.dtype == torch.bool:
            raise ForestError(
                f"input_ids must be integers [T] with T = {self.num_tokens} packed tokens, got "
                f"shape {list(input_ids.shape)} of {input_ids.dtype}"
            )
        self._token_ids()
        buffer = self._buffer.clone()
        _columns(buffer).token.copy_(input_ids)
        return PackedForest(self.forest, buffer, self.mask)

    def model_inputs(self) -> dict[str, Any]:
        """Returns keyword arguments for a transformers model: `model(**packed.model_inputs())`.

        Returns:
            input_ids and position_ids, int64 [1, T]; tree_mask; use_cache=False;
            num_items_in_batch, an object that raises an UnsupportedError if labels= are given too;
            and tree_routes, int16 [T, layers, k], if the forest has routes.

        Raises:
            ForestError: the forest has no token ids.
        """
        inputs = {
            "input_ids": self._token_ids()[None],
            "position_ids": self.position_ids[None],
            "tree_mask": self.mask,
            "use_cache": False,
            "num_items_in_batch": NoLabels(),
        }
        if self._routes is not None:
            inputs["tree_routes"] = self._routes
        return inputs

    @cached_property
    def _routes(self) -> torch.Tensor | None:
        """The routes on the device, int16 [T, layers, k]; any experts where none are recorded."""
        if (routes := self.forest.routes) is None:
            return None
        routes = np.pad(routes, ((0, self.num_padding), (0, 0), (0, 0)), constant_values=-1)
        any_experts = np.arange(routes.shape[2], dtype=routes.dtype)
        return move(torch.from_numpy(np.where(routes < 0, any_experts, routes)), self.device)

    @with_hints
    def edges(self, loss_mask: Sequence[Any] | None = None) -> Edges:
        """Lists the edges to score, each once.

        Args:
            loss_mask: one mask per sequence, [n], 1 where a token is scored and 0 elsewhere (a
                list, an array or a tensor, aligned with the tokens). A shared token is scored if
                any of its sequences asks for it. Entry 0 has no predictor and is ignored. Default:
                every token is scored, except the first token of each root.

        Returns:
            The edges on the packed forest's device, ascending by `token`.

        Raises:
            ForestError: masks whose number or lengths are not those of the sequences, or that hold
                anything but 0 and 1.
        """
        selected = None if loss_mask is None else self.flat_selection(loss_mask)
        token = self.scored_tokens(selected)
        both = np.concatenate([self.mask.host.predictor[token], token])
        return Edges(*move(torch.from_numpy(both), self.device).view(2, -1))

    @with_hints
    def unpack(
        self,
        values: torch.Tensor,
        sequences: Iterable[int] | None = None,
        loss_mask: Sequence[Any] | None = None,
    ) -> list[torch.Tensor]:
        """Gives every sequence the values of its tokens.

        The gradient of a shared token is the sum over its copies, in fp32 (fp64 for fp64) and in a
        fixed order.

        Args:
            values: [T, ...], any dtype, on the packed forest's device.
            sequences: indices of the sequences wanted. Default: all, in input order.
            loss_mask: as in `edges`, for all sequences; only the tokens that it selects are
                returned. Default: every token, the first included.

        Returns:
            One tensor [n, ...] per sequence, in the dtype of `values`. Of a dummy, zeros.

        Raises:
            TypeError: values that are no tensor.
            ForestError: values of another length than T or on another device; sequences that are no
                integers; masks as in `edges`.
            IndexError: a sequence that does not exist.
        """
        self._check_values(values)
        wanted = self._sequence_indices(sequences)
        selected = None if loss_mask is None else self.flat_selection(loss_mask)
        index, counts = self.copy_index(wanted, selected)
        flat = gather(values, self._gather_index(index))
        return list(flat.split(counts.tolist()))

    @with_hints
    def unpack_padded(
        self,
        values: torch.Tensor,
        padding_value: float = 0,
        padding_side: str | None = None,
        length: int | None = None,
    ) -> torch.Tensor:
        """Gives every sequence the values of its tokens, in one padded tensor [S, L, ...].

        Args:
            values: [T, ...], any dtype, on the packed forest's device.
            padding_value: the value where there is no token.
            padding_side: "right" or "left". Default: a forest made by `from_padded` puts every
                token back into the column it came from; any other is padded on the right.
            length: L, in tokens. Default: the padded length given to `from_padded`, otherwise the
                length of the longest sequence.

        Returns:
            [S, L, ...] in the dtype of `values`. Of a dummy, zeros.

        Raises:
            TypeError: as `unpack`.
            ForestError: as `unpack`.
            ValueError: an unknown side, a padding_value that is no number, or a length that is no
                integer or below the longest sequence.
        """
        self._check_values(values)
        if not isinstance(padding_value, bool):
            padding_value = number("padding_value", padding_value, finite=False)
        lengths = self.forest.sequence_lengths
        columns = self.forest.columns
        if columns is not None and padding_side is None and length is None:
            length, first = columns
        else:
            length = int(lengths.max()) if length is None else integer("length", length)
            if padding_side not in (None, "left", "right"):
                raise ValueError(f"padding_side must be 'left' or 'right', got {padding_side!r}")
            if length < lengths.max():
                raise ValueError(
                    f"length must be at least {lengths.max()}, that of the longest sequence, got "
                    f"{length}"
                )
            first = length - lengths if padding_side == "left" else np.zeros_like(lengths)
        index, _ = self.copy_index(self._sequence_indices(None))
        rows = np.arange(len(lengths)) * length + first
        place = np.repeat(rows - self._offsets[:-1], lengths) + np.arange(len(index))
        padded = np.full(len(lengths) * length, -1, np.int32)
        padded[place] = index
        out = gather(values, self._gather_index(padded))
        if padding_value != 0:
            empty = move(torch.from_numpy(padded < 0), self.device)
            out = out.masked_fill(empty.view(-1, *[1] * (values.ndim - 1)), padding_value)
        return out.view(len(lengths), length, *values.shape[1:])

    @with_hints
    def pack_values(
        self, values: Sequence[Any], loss_mask: Sequence[Any] | None = None
    ) -> torch.Tensor:
        """Packs values that are given per sequence: the inverse of `unpack`.

        Args:
            values: one entry per sequence, [n, ...] (a tensor, an array or a list). The copies of a
                shared token must be equal. No entry may require a gradient, because it is not clear
                which copy should get it.
            loss_mask: as in `edges`. Only the copies that it selects are compared and taken. A
                token that one turn of a rollout sampled is prompt in the next turn, and only the
                first turn has its data. Default: every copy counts.

        Returns:
            [T, ...] on the packed forest's device; 0 at padding, and where no copy counts.

        Raises:
            ForestError: values that are no numbers, that require a gradient, or whose number or
                lengths are not those of the sequences; a shared token whose copies differ (NaN
                equals NaN); masks as in `edges`.
        """
        listed = per_sequence("values", values, self.forest.num_sequences)
        tensors = [self._tensor(f"values[{i}]", v) for i, v in enumerate(listed)]
        lengths = [t.shape[0] if t.ndim else -1 for t in tensors]
        check_lengths("values", lengths, self.forest.sequence_lengths)
        flat = torch.cat(tensors)
        index, _ = self.copy_index(self._sequence_indices(None))
        if loss_mask is None:
            copies = np.arange(len(index))
        else:
            copies = np.flatnonzero(self.flat_selection(loss_mask))
            flat = flat.index_select(0, move(torch.from_numpy(copies), self.device))
            index = index[copies]
        first = loops.sequence_copies.first_copy(index, self.forest.num_tokens)
        has_copy = np.flatnonzero(first >= 0)
        packed = flat.new_zeros((self.num_tokens, *flat.shape[1:]))
        both = move(torch.from_numpy(np.stack([has_copy, first[has_copy]])), self.device)
        packed.index_copy_(0, both[0], flat.index_select(0, both[1]))
        copied = packed.index_select(0, move(torch.from_numpy(index), self.device))
        differs = (copied != flat) & ~(copied.isnan() & flat.isnan())
        differs = differs.flatten(1).any(1) if flat.ndim > 1 else differs
        if bool(differs.any()):
            bad = int(differs.int().argmax())
            sequence = int(np.searchsorted(self._offsets, copies[bad], side="right")) - 1
            mend = "give loss_mask= where some copies do not count (those in a prompt), "
            raise ForestError(
                f"values[{sequence}][{copies[bad] - self._offsets[sequence]}] differs from another "
                f"copy of the same shared token (packed token {index[bad]}); values that differ "
                f"between sequences cannot be packed: {mend * (loss_mask is None)}give the forest "
                "namespaces=, or keep them per sequence"
            )
        return packed

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedForest:
        return _rebuild(self.forest, self._buffer, self.mask)

    def __reduce__(self) -> tuple[Any, ...]:
        # another process gets the forest on the CPU, like its mask
        return _rebuild, (self.forest, self._buffer.cpu(), self.mask)

    def __repr__(self) -> str:
        return f"PackedForest({self.forest!r}, {self.num_padding} padding, {self.device})"

    # ---- what adapters build on ------------------------------------------------------------------

    def flat_selection(self, loss_mask: Sequence[Any]) -> np.ndarray:
        """Checks masks per sequence, as in `edges`, and joins them to uint8 [R], 1 if selected."""
        return flat_selection(loss_mask, self.forest.sequence_lengths)

    def selected_tokens(
        self, selected: np.ndarray, sequences: np.ndarray | None = None
    ) -> np.ndarray:
        """Finds the tokens that `selected`, uint8 [R], has in any of the sequences: bool [T]."""
        if sequences is None:
            sequences = self._sequence_indices(None)
        args = (*self._nodes, sequences, self._offsets, selected, self.num_tokens)
        return loops.sequence_copies.any_copy(*args)

    def scored_tokens(self, selected: np.ndarray | None) -> np.ndarray:
        """Finds the tokens with a predictor that `selected`, uint8 [R], has: int64, ascending."""
        scored = self.mask.host.predictor >= 0
        if selected is not None:
            scored = scored & self.selected_tokens(selected)
        return np.flatnonzero(scored)

    def copy_index(
        self, sequences: np.ndarray, selected: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Lists the packed index, int32, of each selected token, sequence after sequence.

        The second result is the number of selected tokens per sequence, int64. `selected` is uint8
        [R], from `flat_selection`; None selects all.
        """
        # the compiled loop takes arrays alone
        chosen = np.empty(0, np.uint8) if selected is None else selected
        return loops.sequence_copies.copy_index(*self._nodes, sequences, self._offsets, chosen)

    def _gather_index(self, index: np.ndarray) -> GatherIndex:
        if self.forest.is_dummy:
            # zeros, which give no gradient
            index = np.full_like(index, -1)
        return GatherIndex(index, self.num_tokens, self.device)

    @property
    def _nodes(self) -> tuple[np.ndarray, ...]:
        f = self.forest
        return f.node_parent, f.node_start, f.node_length, f.node_position, f.sequence_node

    @property
    def _offsets(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.forest.sequence_lengths)])

    def _sequence_indices(self, sequences: Iterable[int] | None) -> np.ndarray:
        count = self.forest.num_sequences
        if sequences is None:
            return np.arange(count)
        listed = entries("sequences", sequences, "a list of integer indices")
        wanted = integers("sequences", listed)
        for bad in wanted[(wanted < 0) | (wanted >= count)][:1]:
            raise IndexError(f"sequence {bad} does not exist; expected indices 0 to {count - 1}")
        return wanted

    def _tensor(self, name: str, values: Any) -> torch.Tensor:
        """Makes a tensor on the device of one entry of `pack_values`."""
        check_unmasked(name, values)
        try:
            tensor = torch.as_tensor(values, device=self.device)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise ForestError(f"{name} is no tensor, array or list of numbers: {problem}") from None
        check_without_gradient(name, tensor)
        return tensor

    def _token_ids(self) -> torch.Tensor:
        if self.input_ids is None:
            raise ForestError("this forest has no token ids; give from_parents its tokens=")
        return self.input_ids

    def _check_values(self, values: torch.Tensor) -> None:
        if not isinstance(values, torch.Tensor):
            raise TypeError(f"values must be a torch tensor, got {type(values).__name__}")
        if values.ndim == 0 or values.shape[0] != self.num_tokens:
            raise ForestError(
                f"values must be [T, ...] with T = {self.num_tokens} packed tokens, got shape "
                f"{list(values.shape)}"
            )
        if values.device != self.device:
            raise ForestError(
                f"values are on {values.device}, the packed forest is on {self.device}; move one"
            )


@lasting
def _rebuild(forest: PrefixForest, buffer: torch.Tensor, mask: TreeMask) -> PackedForest:
    # a copy: the unpickled buffer may be an inference tensor
    return PackedForest(forest, buffer.clone(), mask)


@lasting
@with_hints
def pack(forest: PrefixForest, pad_to_multiple_of: int | None = None) -> PackedForest:
    """Lays a forest out in preorder, each distinct token once.

    Args:
        forest: the PrefixForest.
        pad_to_multiple_of: appends padding tokens up to a multiple of this number. Padding has id 0
            and position 0, sees only itself, is seen by nobody, and is in no sequence and no edge.
            Default: no padding.

    Returns:
        The packed forest on the CPU; `.to(device)` moves it.

    Raises:
        TypeError: anything but a PrefixForest.
        ValueError: pad_to_multiple_of that is neither None nor an integer >= 1.
    """
    if not isinstance(forest, PrefixForest):
        mend = "PrefixForest.from_sequences makes one"
        if hasattr(forest, "packed"):
            mend = "batch.packed is its packed forest"
        raise TypeError(f"pack takes a PrefixForest, got {kind_of(forest, PrefixForest)}; {mend}")
    if pad_to_multiple_of is not None:
        pad_to_multiple_of = integer("pad_to_multiple_of", pad_to_multiple_of, 1, or_none=True)
    padding = 0 if pad_to_multiple_of is None else -forest.num_tokens % pad_to_multiple_of
    num_tokens = forest.num_tokens + padding
    subtree_end = np.arange(1, num_tokens + 1, dtype=np.int32)
    subtree_end[: forest.num_tokens] = np.repeat(forest.node_subtree_end, forest.node_length)
    mask = TreeMask(subtree_end)
    host = mask.host
    buffer = np.zeros(_WORDS * num_tokens, np.int32)
    columns = _columns(buffer)
    if forest.tokens is not None:
        columns.token[: forest.num_tokens] = forest.tokens
    columns.position[:] = columns.narrow_position[:] = host.position
    columns.subtree_end[:] = subtree_end
    columns.predictor[:] = host.predictor
    columns.multiplicity[: forest.num_tokens] = np.repeat(
        forest.node_multiplicity, forest.node_length
    )
    return PackedForest(forest, torch.from_numpy(buffer), mask)
