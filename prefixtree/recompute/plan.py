"""Plans what layers recompute, so that a micro-batch fits and as little as possible runs again.

Layers that recompute nothing stand last: their memory is free again before the backward of the
others begins. In front of them stand layers that keep attention, and first those that recompute
all. Of all such plans that fit, the one that recomputes the fewest FLOPs is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from prefixtree.forest import PrefixForest
from prefixtree.images.encoder import RUN
from prefixtree.packing.visible import visible_pairs
from prefixtree.recompute.image_work import EncoderChoice, ImageWork
from prefixtree.recompute.layers import MODES, Mode

if TYPE_CHECKING:
    from prefixtree.planning.model_cost import ModelCost
    from prefixtree.planning.parts import Part
    from prefixtree.recompute.memory import EncoderMemory, ModelMemory

# a plan [a, b] cuts the layers into one run per mode
assert len(MODES) == 3

_GIB = 2**30
# choices of the images that a vision encoder keeps
_CHOICES = 64
# logits of a chunk of scored edges, and their float32 copies where no kernel of ours runs
_LOGITS = 1 << 29


@dataclass(frozen=True)
class RecomputePlan:
    """The mode of recomputation of each layer of a model, for one backward.

    Attributes:
        modes: "all", "all_but_attention" or "nothing", first layer to last.
        peak_bytes: the most bytes of activations that are alive at once, as predicted. Gradients of
            weights that are added to kept ones count; weights and kept gradients do not.
        patches: patches of images that the vision encoder takes at once; a larger image is taken
            alone.
        kept: the vision encoder keeps its activations of as many of the last images as have at most
            so many patches. It computes the others again in the backward. None, as in plans without
            images: it computes all of them again.
    """

    modes: tuple[Mode, ...]
    peak_bytes: int
    patches: int = RUN
    kept: int | None = None

    def __str__(self) -> str:
        counts = ", ".join(f"{self.modes.count(mode)} {mode}" for mode in MODES)
        if self.kept is not None:
            counts += f"; the vision encoder keeps {self.kept:,} patches"
        return f"recomputed in {len(self.modes)} layers: {counts}; {self.peak_bytes / _GIB:.1f} GiB"


@dataclass(frozen=True)
class Work:
    """A micro-batch, as the memory model sees it."""

    forest: PrefixForest
    # edges whose log-probability is computed
    scored: int
    # whether the lm_head's weight gets a gradient
    trains_lm_head: bool = True
    # images that its forest places; None for text alone
    images: ImageWork | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the forest."""
        return self.forest.num_tokens

    @property
    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """The position of the first token of each run, and its tokens, int64 [runs] each."""
        forest = self.forest
        return forest.node_position.astype(np.int64), forest.node_length.astype(np.int64)


@dataclass(frozen=True)
class PartWork:
    """A trunk, a micro-batch that imports from trunks, or a rank's part, for the memory model."""

    # int64 [runs] each: the position of the first token of each run of own tokens, and its tokens
    runs: tuple[np.ndarray, np.ndarray]
    # rows of keys and values that every layer imports
    imported: int
    # edges whose log-probability is computed
    scored: int
    # whether the lm_head's weight gets a gradient
    trains_lm_head: bool = True
    # rows that every layer exports
    exported: int = 0
    # own tokens after which recurrent layers export their states
    states: int = 0
    # images that it encodes; None for text alone
    images: ImageWork | None = None
    # additional rows of float32 keys and values that the backward of attention has at once,
    # compared with a whole forest; None for as many as are imported
    wide: float | None = None
    # others' tokens that recurrent layers compute again
    above: int = 0

    @property
    def num_tokens(self) -> int:
        """The number of own tokens."""
        return int(self.runs[1].sum())

    @classmethod
    def of(cls, part: Part, scored: int, trains_lm_head: bool, states: int = 0) -> PartWork:
        """Makes the work of a part of a forest; the other arguments are attributes."""
        position = part.host.position[part.own_tokens].astype(np.int64)
        starts = np.flatnonzero(np.diff(position, prepend=-2) != 1)
        runs = position[starts], np.diff(starts, append=len(position))
        exported = len(part.exported_rows)
        return cls(runs, part.num_imported, scored, trains_lm_head, exported, states)


def scoring_bytes(memory: ModelMemory, work: Work | PartWork) -> float:
    """The most additional bytes of the last norm and the lm_head while layers hold theirs."""
    cost = memory.cost
    # hidden states of predictors and of edges, and their gradients
    rows = 4 * work.scored * cost.hidden * cost.element_bytes
    of_norm = round(memory.after * work.num_tokens)
    rows += of_norm
    if not work.trains_lm_head:
        head = rows + (_LOGITS if work.scored else 0)
    else:
        # a float32 sum next to a chunk of logits; then the sum and its copy in the weight's dtype
        copy = cost.element_bytes * cost.lm_head_weights
        head = rows + 4 * cost.lm_head_weights + max(_LOGITS, copy)
    return max(head, of_norm + memory.norm * work.num_tokens + waiting_bytes(memory, work))


def waiting_bytes(memory: ModelMemory, work: Work | PartWork) -> float:
    """Bytes that wait from the backward of the lm_head to that of the embedding."""
    return memory.tied if work.trains_lm_head else 0.0


def plan_for(
    memory: ModelMemory,
    work: Work | PartWork,
    available: float,
    encoder: EncoderMemory | None = None,
    *,
    with_spare: bool = False,
) -> RecomputePlan:
    """Finds the plan that recomputes least of those that need at most `available` bytes.

    With `with_spare`, layers leave `spare_bytes` free, otherwise only what was planned with. If not
    even a backward that recomputes every layer fits, or the vision encoder with one image at a
    time, it raises a torch.OutOfMemoryError.
    """
    # features of images are there from the vision encoder's forward to its backward, which comes
    # last, when the activations of layers are gone, so the larger of both counts; the vision
    # encoder keeps its activations of the last images where that saves more multiply-adds than
    # layers would with these bytes, and computes again in runs of as many patches as fit
    peaks, cost = peaks_of(memory, work), recomputed_by(memory, work)
    spare = spare_bytes(memory, work, with_spare)
    if work.images is None or encoder is None:
        plan = cheapest(peaks, cost, available - spare)
        if plan is None:
            raise torch.OutOfMemoryError(too_large(memory, work, available, peaks[-1, -1]))
        return plan
    images = work.images
    held = images.held(encoder)
    available -= held
    # the gradient of the embedding waits, and that of an lm_head with its weight
    ends = memory.before * work.num_tokens + waiting_bytes(memory, work)
    choices = images.choices(encoder, _CHOICES)
    if choices[0].needs > available - ends:
        number, largest = max(images.patches.items(), key=lambda item: item[1])
        at_once, run = images.runs(encoder, available - ends, choices[0])
        raise torch.OutOfMemoryError(
            f"the vision encoder needs about {run / _GIB:.1f} GiB for image "
            f"{number} alone, the largest with {largest:,} patches, and "
            f"{max(0.0, available - ends) / _GIB:.1f} GiB are available beside pixels and "
            f"features, enough for {at_once:,} patches at once: give smaller images (max_pixels "
            "of the processor), fewer of them in a micro-batch, or more memory"
        )
    fitting: list[tuple[float, RecomputePlan, EncoderChoice]] = []
    for choice in choices:
        free = spare_beside(choice, spare)
        if choice.needs + free > available - ends:
            continue
        text = cheapest(peaks, cost, available - choice.held - np.maximum(spare, free))
        if text is not None:
            again = float(cost[place_of(text)]) + choice.again
            fitting.append((again, text, choice))
    if not fitting:
        raise torch.OutOfMemoryError(too_large(memory, work, available, peaks[-1, -1]))
    # the first of equal ones keeps least
    _, text, choice = min(fitting, key=lambda each: each[0])
    room = available - ends - spare_beside(choice, spare)
    at_once, run = images.runs(encoder, room, choice)
    peak = max(text.peak_bytes + choice.held, run + ends)
    return replace(text, peak_bytes=round(peak + held), patches=at_once, kept=choice.kept)


def cheapest(
    peaks: np.ndarray, cost: np.ndarray, available: float | np.ndarray
) -> RecomputePlan | None:
    """The plan of least cost that fits, and the smallest of equal ones; None if none fits.

    peaks (bytes) and cost are of all plans [a, b]: layers before a recompute all, from b on
    nothing. available bytes are for all plans or for each.
    """
    fits = np.where(peaks <= available, cost, np.inf)
    best = np.flatnonzero(fits == fits.min())
    if not np.isfinite(fits.min()):
        return None
    return plan_at(peaks, int(best[peaks.flat[best].argmin()]))


def place_of(plan: RecomputePlan) -> tuple[int, int]:
    """The place [a, b] of a plan in arrays of all plans."""
    counts = [plan.modes.count(mode) for mode in MODES]
    return counts[0], counts[0] + counts[1]


def plan_at(peaks: np.ndarray, place: int) -> RecomputePlan:
    """The plan at a place in `peaks`, row after row."""
    a, b = divmod(place, peaks.shape[1])
    modes = modes_at(a, b, peaks.shape[0] - 1)
    return RecomputePlan(modes, round(float(peaks.flat[place])))


def modes_at(a: int, b: int, layers: int) -> tuple[Mode, ...]:
    """The modes of a plan whose layers before a recompute all, and from b on nothing."""
    counts = (a, b - a, layers - b)
    return tuple(mode for mode, n in zip(MODES, counts, strict=True) for _ in range(n))


def reserve(total: int) -> int:
    """Bytes of a device's `total` that are not planned with: 5 %, and 1 GiB at least."""
    # for fragments, kernels and communication
    return max(1 << 30, total // 20)


def spare_bytes(memory: ModelMemory, work: Work | PartWork, with_spare: bool) -> float | np.ndarray:
    """Additional bytes that each plan [a, b] leaves free; 0.0 unless `with_spare`."""
    # the first backward puts gradients of weights into large blocks that activations left; those
    # stay cut, and later tensors of other sizes do not fit them; half of what the backward of a
    # layer takes is set aside for that, but not by the plan that recomputes all
    # torch's allocator, simulated on blocks of Qwen3-VL-2B's shape, lacked up to 0.3 of it beyond
    # the reserve, and 0.06 where all was recomputed. It runs out where an H100 did: 70.7 GiB were
    # allocated and 7.5 GiB did not fit
    if not with_spare:
        return 0.0
    largest = max(float(_bytes(memory, m, "working", work.num_tokens).max()) for m in MODES)
    spare = np.full((len(memory.layers["all"]) + 1,) * 2, largest / 2)
    spare[-1, -1] = 0.0
    return spare


def spare_beside(choice: EncoderChoice, spare: float | np.ndarray) -> float:
    """The part of `spare_bytes` that all plans, and the encoder after the layers, leave free."""
    # all of them if the vision encoder keeps anything, as that leaves blocks to be cut
    return float(np.max(spare)) if choice.kept else 0.0


def tokens_that_fit(
    memory: ModelMemory,
    available: float,
    scored_share: float,
    mode: Mode = "all",
    trains_lm_head: bool = True,
) -> int:
    """The most tokens of a micro-batch in `available` bytes; 0 if scoring one takes too much."""
    # `scored_share` are scored edges per token, `mode` is that of every layer

    def fits(tokens: int) -> bool:
        chain = PrefixForest.from_parents([-1], [tokens])
        work = Work(chain, int(scored_share * tokens), trains_lm_head)
        scoring, waiting = scoring_bytes(memory, work), waiting_bytes(memory, work)
        return memory.peak(tokens, mode, scoring, waiting) <= available

    low, high = 0, 1
    if not fits(1):
        return 0
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _bytes(memory: ModelMemory, mode: Mode, part: str, tokens: int | np.ndarray) -> np.ndarray:
    lines = np.array([getattr(layer, part) for layer in memory.layers[mode]])
    return lines[:, 0] * tokens + lines[:, 1]


def layer_tokens(cost: ModelCost, work: Work | PartWork) -> int | np.ndarray:
    """The number of tokens that a layer computes, or that each layer computes."""
    if isinstance(work, Work) or not work.above:
        return work.num_tokens
    return work.num_tokens + np.array([work.above if x.state else 0 for x in cost.layers])


def _held_by(memory: ModelMemory, work: Work | PartWork) -> dict[Mode, np.ndarray]:
    """Bytes that the layers before each keep from forward to backward, [layers + 1], by mode."""
    tokens = layer_tokens(memory.cost, work)
    held = {mode: _bytes(memory, mode, "held", tokens) for mode in MODES}
    for mode in MODES:
        rows, _ = added_by_rows(memory.cost, work, mode)
        held[mode][memory.frozen :] += rows[memory.frozen :]
    return {mode: np.concatenate([[0.0], np.cumsum(x)]) for mode, x in held.items()}


def held_by_plans(memory: ModelMemory, work: PartWork) -> np.ndarray:
    """Bytes that a part's graph holds from its forward to its backward, for all plans [a, b]."""
    cost = memory.cost
    first, middle, last = _held_by(memory, work).values()
    layers = (first - middle)[:, None] + (middle - last)[None, :] + last[-1]
    # hidden states of predictors and of edges
    rows = 2 * work.scored * cost.hidden * cost.element_bytes
    return layers + rows + (memory.before + memory.after) * work.num_tokens


def _row_bytes(cost: ModelCost) -> np.ndarray:
    """Bytes of the key and the value of a token in each layer."""
    size = cost.kv_heads * (cost.head_dim + cost.value_dim) * cost.element_bytes
    return np.array([size if layer.per_pair else 0 for layer in cost.layers], np.float64)


def peaks_of(memory: ModelMemory, work: Work | PartWork) -> np.ndarray:
    """Predicts peaks of all plans [a, b]: layers before a recompute all, from b on nothing."""
    tokens, scoring = work.num_tokens, scoring_bytes(memory, work)
    waiting = waiting_bytes(memory, work)
    held, reach = _held_by(memory, work), {}
    of_layers = layer_tokens(memory.cost, work)
    for mode in MODES:
        working = _bytes(memory, mode, "working", of_layers)
        working = working + added_by_rows(memory.cost, work, mode)[1]
        # peak of a layer's backward if every layer before has this mode
        reach[mode] = held[mode][1:] + working + waiting
    first, middle, last = (held[mode] for mode in MODES)
    count = len(first)
    none = np.full(1, -np.inf)
    in_first = np.concatenate([none, np.maximum.accumulate(reach["all"])])
    in_last = np.concatenate([np.maximum.accumulate(reach["nothing"][::-1])[::-1], none])
    in_middle = np.full((count, count), -np.inf)
    for a in range(count - 1):
        in_middle[a, a + 1 :] = np.maximum.accumulate(reach["all_but_attention"][a:])
    # bytes of the layers before b, less what they would hold in the last mode
    below = first[:, None] - middle[:, None] + (middle - last)[None, :]
    peaks = np.maximum.reduce(
        [
            np.broadcast_to(in_first[:, None], in_middle.shape),
            (first - middle)[:, None] + in_middle,
            below + in_last[None, :],
            below + last[-1] + scoring,
        ]
    )
    # a plan has a <= b
    peaks[np.tril_indices(count, -1)] = np.inf
    return peaks + memory.before * tokens


def added_by_rows(
    cost: ModelCost, work: Work | PartWork | None, mode: Mode
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that imported rows add to what each layer holds, and to its backward."""
    rows = _row_bytes(cost)
    if not isinstance(work, PartWork):
        return 0.0 * rows, 0.0 * rows
    wide = work.imported if work.wide is None else work.wide
    # copies joined with own rows, made again if attention is; gradients are float32
    held = work.imported * rows if mode == "nothing" else 0.0 * rows
    again = 0 if mode == "nothing" else work.imported
    return held, rows * (again + wide * 4 / cost.element_bytes)


def recomputed_by(memory: ModelMemory, work: Work | PartWork) -> np.ndarray:
    """Multiply-adds computed again by all plans [a, b], by layers that a gradient reaches."""
    linear, attention = layer_products(memory, work)
    linear[: memory.frozen] = attention[: memory.frozen] = 0.0
    every = np.concatenate([[0.0], np.cumsum(linear + attention)])
    without = np.concatenate([[0.0], np.cumsum(linear)])
    return (every - without)[:, None] + without[None, :]


def layer_products(memory: ModelMemory, work: Work | PartWork) -> tuple[np.ndarray, np.ndarray]:
    """Multiply-adds of a forward of each layer: of all but attention, and of attention."""
    layers = memory.cost.layers
    pairs = {window: visible_pairs(*work.runs, window) for window in {x.window for x in layers}}
    attention = [
        (x.per_pair + x.index_per_pair) * pairs[x.window] + x.state * work.num_tokens
        for x in layers
    ]
    linear = np.array([x.weights * work.num_tokens for x in layers], np.float64)
    return linear, np.array(attention, np.float64)


def too_large(
    memory: ModelMemory,
    work: Work | PartWork,
    available: float,
    needed: float,
    beside: str = "",
) -> str:
    """The message for a plan that recomputes every layer and still needs too much."""
    # `beside` names the part of `needed` that others than the micro-batch hold
    tokens = work.num_tokens
    share = work.scored / max(1, tokens)
    fit = tokens_that_fit(memory, available, share, trains_lm_head=work.trains_lm_head)
    remedy = (
        f"give at most {fit:,} tokens (max_tokens of plan_micro_batches; in verl "
        "ppo_max_token_len_per_gpu; in TRL a smaller per_device_train_batch_size)"
    )
    if fit == 0:
        remedy = (
            "not one token fits with weights, gradients and what else is in memory: free some, "
            "or shard the model over more devices (FSDP2)"
        )
    return (
        f"a micro-batch of {tokens:,} distinct tokens needs about {needed / _GIB:.1f} GiB "
        f"for activations with every layer recomputed{beside}, and "
        f"{max(0.0, available) / _GIB:.1f} GiB are available: {remedy}"
    )
