"""Numbers that callers give: each public argument reads what is right, refuses the rest by name."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree.integrations.dualkv import dualkv_mask, flash_attn_dualkv_varlen_func
from prefixtree.kernels import recurrence
from prefixtree.planning.parts import Parts
from prefixtree.planning.split import split_tokens
from prefixtree.planning.steps import plan_any_steps, plan_steps
from prefixtree.rollouts import Rollouts
from prefixtree.sampling import Draws, TreeSampler
from tests.package import number_kinds as kinds
from tests.package.number_kinds import SEQUENCES, Kind, two
from tests.package.test_public import PUBLIC
from tests.support.models import build, reward_model

FOREST = pt.PrefixForest.from_sequences(SEQUENCES)
PACKED = pt.pack(FOREST)
PLAN = pt.plan_micro_batches(SEQUENCES, 9)
SHAPE = pt.TileShape(4, 4)
PARTS = Parts(PACKED, [0] * 4, 1)
HEADS = torch.zeros(4, 1, 8)
GATES = torch.zeros(4, 1)


class Case(NamedTuple):
    """A call that takes one argument; `few`: how many of its right values are tried."""

    call: Callable[[Any], Any]
    kind: Kind
    few: int


CASES: dict[str, Case] = {}


def add(name: str, call: Callable[..., Any], few: int = 99, **arguments: Kind) -> None:
    """Cases of a function or a method, one per keyword; everything else in the call is right."""
    for argument, kind in arguments.items():
        given = partial(lambda argument, x: call(**{argument: x}), argument)
        CASES[f"{name}({argument})"] = Case(given, kind, few)


@cache
def model() -> Any:
    return build("qwen3").train()


@cache
def critic() -> Any:
    return reward_model("qwen3")


@cache
def rows() -> Any:
    return TreeSampler(model(), 99).start(FOREST)


def of_rows(name: str) -> Callable[..., Any]:
    return lambda **given: getattr(rows(), name)(**given)


def of_model(call: Callable[..., Any], *others: Any) -> Callable[..., Any]:
    """Memory of a few bytes is a number of bytes, too."""

    def called(**given: Any) -> Any:
        try:
            return call(model(), *others, **given)
        except torch.OutOfMemoryError:
            return None

    return called


def kept(**given: Any) -> Any:
    batches = pt.plan_micro_batches(FOREST, 64, trunks=True)[0]
    # it reads them at once
    return pt.kept_trunks(model(), batches, **given).__enter__()


def sampled(**given: Any) -> Any:
    return TreeSampler(model(), 99).sample(
        **{"prompts": SEQUENCES, "n": 1, "max_new_tokens": 1} | given
    )


def image_of(kind: str, **given: Any) -> pt.Images:
    """One image of one placeholder."""
    config = SimpleNamespace(
        model_type="qwen2_5_vl",
        image_token_id=60,
        video_token_id=61,
        text_config=SimpleNamespace(vocab_size=64),
        vision_config=SimpleNamespace(spatial_merge_size=2),
    )
    grid = [[1, 2, 2]]
    one = {"pixel_values": np.ones((4, 3)), "image_grid_thw": grid}
    token = 60
    if kind == "video":
        other = {"pixel_values_videos": np.ones((4, 3)), "video_grid_thw": grid}
        one, token = {"pixel_values": None, "image_grid_thw": None, **other}, 61
    return pt.Images.from_batch(**{"sequences": [[3, token, 4]], **one, "config": config, **given})


def rollouts() -> Rollouts:
    each: Any = two(None)
    return Rollouts(
        source="test",
        sequences=[np.array(s) for s in SEQUENCES],
        loss_masks=None,
        groups=["a", "b"],
        ids=["a", "b"],
        origins=[0, 1],
        lines=[1, 2],
        turn_ends=each,
        routes=each,
        messages=None,
        turns=each,
        sampled=each,
    )


F, K = pt.PrefixForest, kinds
add(
    "PrefixForest.from_sequences",
    partial(F.from_sequences, sequences=SEQUENCES),
    sequences=K.TOKENS,
    namespaces=K.LABELS,
    routes=K.ROUTES,
)
add(
    "PrefixForest.from_sequences",
    partial(F.from_sequences, SEQUENCES, routes=K.ROUTES.right[0]),
    loss_mask=K.MASKS,
)
add(
    "PrefixForest.from_padded",
    partial(F.from_padded, input_ids=SEQUENCES, attention_mask=np.ones((2, 3))),
    input_ids=K.PADDED,
    attention_mask=K.PADDING,
    namespaces=K.LABELS,
)
add(
    "PrefixForest.from_groups",
    partial(F.from_groups, prompts=two([3]), responses=two(two([3]))),
    prompts=K.TOKENS,
    responses=Kind([[SEQUENCES] * 2], [5, "ab", None, *([x, x] for x in K.TOKENS.wrong)]),
)
add(
    "PrefixForest.from_parents",
    partial(F.from_parents, parents=[-1], lengths=[1]),
    parents=K.PARENTS,
    lengths=K.ENDS,
    sequence_ends=K.INTEGERS,
)
add("PrefixForest.from_parents", partial(F.from_parents, [-1], [1]), tokens=K.FLAT)
add(
    "PrefixForest.from_parents",
    partial(F.from_parents, [-1], [3], [3, 4, 5]),
    routes=Kind([x[0] for x in K.ROUTES.right], [5, "ab", *(x[0] for x in K.ROUTES.wrong[4:])]),
)
add("PrefixForest.path", FOREST.path, sequence=K.INDEX)
add("Images.from_batch", partial(image_of, "image"), 0, sequences=K.TOKENS)
image, video = partial(image_of, "image"), partial(image_of, "video")
add("Images.from_batch", image, pixel_values=K.PIXELS, image_grid_thw=K.GRIDS)
add("Images.from_batch", video, pixel_values_videos=K.PIXELS, video_grid_thw=K.GRIDS)
add("Images.from_batch", video, second_per_grid_ts=K.SECONDS)
add(
    "image_key",
    lambda pixels=HEADS[:, 0], grid=(1, 2, 2), seconds=None: pt.image_key(
        pixels, grid, "video", seconds
    ),
    pixels=K.PIXELS,
    grid=K.GRID,
    seconds=K.REAL,
)

add("pack", partial(pt.pack, FOREST), pad_to_multiple_of=K.COUNT)
add("PackedForest.with_input_ids", PACKED.with_input_ids, input_ids=K.IDS)
add("PackedForest.edges", PACKED.edges, loss_mask=K.MASKS)
add("PackedForest.flat_selection", PACKED.flat_selection, loss_mask=K.MASKS)
add("PackedForest.unpack", PACKED.unpack, values=K.TENSOR)
ids: Any = PACKED.input_ids
add("PackedForest.unpack", partial(PACKED.unpack, ids), sequences=K.INDICES, loss_mask=K.MASKS)
add("PackedForest.unpack_padded", PACKED.unpack_padded, values=K.TENSOR)
add(
    "PackedForest.unpack_padded",
    partial(PACKED.unpack_padded, ids.float()),
    padding_value=K.ANY_REAL,
    length=K.COUNT,
)
add("PackedForest.pack_values", PACKED.pack_values, values=K.VALUES)
add("PackedForest.pack_values", partial(PACKED.pack_values, PACKED.unpack(ids)), loss_mask=K.MASKS)
add("TreeMask", pt.TreeMask, subtree_end=K.ENDS)
add("TreeMask.for_queries", PACKED.mask.for_queries, ranges=K.RANGES)
add("TreeMask.tables", partial(PACKED.mask.tables, SHAPE), window=K.COUNT)
add("TreeMask.stats", partial(PACKED.mask.stats, SHAPE), window=K.COUNT)
add("TreeMask.dense", PACKED.mask.dense, window=K.COUNT)
add("TileShape", partial(pt.TileShape, tile_q=4, tile_k=4), tile_q=K.COUNT, tile_k=K.COUNT)
add("TileShape", partial(pt.TileShape, 4, 4), piece_tiles=K.FROM_0)

add(
    "plan_micro_batches",
    partial(pt.plan_micro_batches, sequences=SEQUENCES, max_tokens=9),
    sequences=K.TOKENS,
    max_tokens=K.COUNT,
    num_ranks=K.COUNT,
    min_micro_batches=K.COUNT,
    groups=K.LABELS,
    namespaces=K.LABELS,
)
add("MicroBatchPlan.num_loss_tokens", PLAN.num_loss_tokens, loss_mask=K.MASKS)
add("MicroBatchPlan.loss_weights", PLAN.loss_weights, loss_mask=K.MASKS)
add("MicroBatchPlan.loss_weights", partial(PLAN.loss_weights, "constant"), constant=K.POSITIVE)
add(
    "MicroBatchPlan.token_weights",
    partial(PLAN.token_weights, rollouts=[0, 1]),
    loss_mask=K.MASKS,
    rollouts=K.ROLLOUTS,
    turns=K.TURNS,
)
add(
    "MicroBatchPlan.token_weights",
    partial(PLAN.token_weights, "constant", rollouts=[0, 1]),
    constant=K.POSITIVE,
)
add("MicroBatchPlan[...]", lambda rank: PLAN[rank], 1, rank=K.INDEX)
add("MicroBatch.take", PLAN[0][0].take, values=K.TAKEN)
add("CostModel", pt.CostModel, linear=K.AT_LEAST_0, attention=K.AT_LEAST_0)
add("CostModel", pt.CostModel, image=K.AT_LEAST_0, first_image=K.FROM_0)
add("CostModel", partial(pt.CostModel, window=4), windowed=K.COSTS)
add("CostModel", partial(pt.CostModel, windowed=1.0), window=K.COUNT)
add(
    "CostModel.from_config",
    lambda scored_share: pt.CostModel.from_config(model().config, scored_share=scored_share),
    2,
    scored_share=K.SHARE,
)
add(
    "ImportCost",
    pt.ImportCost,
    layers=K.COUNT,
    kv_heads=K.FROM_0,
    head_dim=K.FROM_0,
    value_dim=K.FROM_0,
    element_bytes=K.FROM_0,
    state_layers=K.FROM_0,
    state_bytes=K.FROM_0,
    token_bytes=K.POSITIVE,
    graph_bytes=K.AT_LEAST_0,
    kept_copies=K.SHARE,
    lm_head=K.AT_LEAST_0,
    linear_rate=K.POSITIVE,
    attention_rate=K.POSITIVE,
    link_rate=K.POSITIVE,
    latency=K.AT_LEAST_0,
)
add("plan_steps", partial(plan_steps, PACKED), max_step_tokens=K.COUNT)
add("plan_any_steps", partial(plan_any_steps, PACKED), max_step_tokens=K.COUNT)
add("split_tokens", partial(split_tokens, PACKED, num_parts=2), num_parts=K.COUNT, tile=K.COUNT)
add("Parts", partial(Parts, PACKED, owner=[0] * 4, num_parts=2), owner=K.OWNERS, num_parts=K.COUNT)
add("Part.scored", PARTS[0].scored, predictor=K.INTEGERS)

_attention = {"scale": K.REAL, "window": K.COUNT, "softcap": K.POSITIVE, "sinks": K.TENSOR}
_attention |= {"q": K.TENSOR, "k": K.TENSOR, "v": K.TENSOR}
for public in (pt.tree_attention, pt.explain):
    call = partial(public, q=HEADS, k=HEADS, v=HEADS, mask=PACKED.mask)
    add(public.__name__, call, **_attention)
add(
    "flash_attn_dualkv_varlen_func",
    partial(
        flash_attn_dualkv_varlen_func,
        **dict.fromkeys(("q", "k_context", "v_context", "k_decoded", "v_decoded"), HEADS),
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k_decoded"), torch.tensor([0, 4])),
        **dict.fromkeys(("max_seqlen_q", "context_seqlen", "max_seqlen_k_decoded"), 4),
    ),
    **dict.fromkeys(("q", "k_context", "v_context", "k_decoded", "v_decoded"), K.TENSOR),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k_decoded"), K.CUMULATIVE),
    **dict.fromkeys(("max_seqlen_q", "context_seqlen", "max_seqlen_k_decoded"), K.COUNT),
    softmax_scale=K.REAL,
)
add("dualkv_mask", partial(dualkv_mask, context_seqlen=4), cu_seqlens=K.CUMULATIVE)
add("dualkv_mask", partial(dualkv_mask, torch.tensor([0, 4])), context_seqlen=K.FROM_0)
_delta = dict.fromkeys(("query", "key", "value"), HEADS) | dict.fromkeys(("g", "beta"), GATES)
_ssd = {"x": HEADS, "dt": GATES, "A": GATES[0], "B": HEADS, "C": HEADS}
_conv = {"x": HEADS[:, 0], "weight": torch.zeros(8, 4), "bias": torch.zeros(8)}
for public, tensors in (
    (recurrence.tree_conv, _conv),
    (recurrence.tree_delta_rule, _delta),
    (recurrence.tree_ssd, _ssd),
):
    call = partial(public, **tensors, mask=PACKED.mask)
    add(public.__name__, call, **dict.fromkeys(tensors, K.TENSOR))
    if public is recurrence.tree_delta_rule:
        add(public.__name__, call, scale=K.REAL)
    if public is recurrence.tree_ssd:
        add(public.__name__, call, dt_limit=K.LIMITS, D=K.TENSOR, dt_bias=K.TENSOR)
add(
    "explain_recurrence",
    partial(recurrence.explain_recurrence, PACKED.mask),
    **dict.fromkeys(("key_dim", "value_dim", "taps"), K.COUNT),
)

add("TreeSampler", of_model(TreeSampler), 1, max_keys=K.COUNT)
add("TreeSampler", of_model(TreeSampler, 9), 1, max_rows=K.COUNT)
add("TreeSampler.sample", sampled, 1, n=K.COUNT, max_new_tokens=K.COUNT, stop=K.STOP)
add("TreeSampler.sample", sampled, 0, prompts=K.TOKENS)
add("Rows.branch", of_rows("branch"), counts=K.COUNTS)
add("Rows.append", of_rows("append"), tokens=K.REPLIES)
add("Rows.new_tokens", of_rows("new_tokens"), row=K.INDEX)
add("Rows.generate", of_rows("generate"), 1, max_new_tokens=K.COUNT)
add("Rows.generate", partial(of_rows("generate"), max_new_tokens=1), stop=K.STOP, rows=K.ROWS)
add("Rows.drop", of_rows("drop"), 0, rows=K.ROWS)
add("Draws", Draws, temperature=K.AT_LEAST_0, seed=K.INTEGER, top_k=K.COUNT)
add("Draws", Draws, top_p=K.SHARE, min_p=K.SHARE)
add("share_dropout", lambda seed: pt.share_dropout(build("qwen3"), seed), few=3, seed=K.INTEGER)
scored = of_model(pt.sequence_logprobs, PACKED)
add("sequence_logprobs", scored, 2, temperature=K.NUMBERS, loss_mask=K.MASKS, chunk_size=K.COUNT)
add("sequence_logprobs", scored, 1, max_step_tokens=K.COUNT, sampling_masks=K.SETS)
valued = lambda **given: pt.sequence_values(critic(), PACKED, **given)  # noqa: E731
add("sequence_values", valued, 1, max_step_tokens=K.COUNT)
add("Teacher", of_model(pt.Teacher, PACKED), loss_mask=K.MASKS)
of_teacher = cache(of_model(lambda student: pt.Teacher(student, PACKED)))
add("Teacher.divergence", lambda **given: of_teacher().divergence(**given), beta=K.SHARE)
add("Teacher.divergence", lambda **given: of_teacher().divergence(**given), vocabulary=K.COUNT)
add("kept_trunks", kept, 2, temperature=K.NUMBERS, loss_mask=K.MASKS, chunk_size=K.COUNT)
add("kept_trunks", kept, 1, sampling_masks=K.SETS)
planned = of_model(pt.plan_recomputation, PACKED)
add("plan_recomputation", planned, 2, memory=K.REAL, scored=K.FROM_0)
fitting = of_model(pt.max_micro_batch_tokens)
add("max_micro_batch_tokens", fitting, 2, memory=K.REAL, scored_share=K.AT_LEAST_0)
add("Rollouts.take", lambda indices: rollouts().take(indices), indices=K.INDICES)
add("Rollouts.first", lambda count: rollouts().first(count), count=K.FROM_0)
add("Rollouts.first_groups", lambda count: rollouts().first_groups(count), count=K.FROM_0)

# what the library makes and gives back
RESULTS = (
    "BlockTables",
    "MaskStats",
    "Images",
    "Image",
    "MicroBatchPlan",
    "MicroBatch",
    "Rows",
)
RESULTS += ("PlanStats", "ReuseStats", "StepStats", "PackedForest", "RecomputePlan", "Samples")
RESULTS += (
    "TrunkStats",
    "Rollouts",
    "RolloutImage",
    "ImageBatch",
    "Conversation",
    "SequenceScores",
    "BatchScores",
    "Verdict",
)
# arguments of public things that no caller's number reaches, and why
ELSEWHERE = {
    "tree_attention(chosen)": "bits in a tensor",
    "PrefixForest": "arrays that its invariants check",
    "Images.with_placeholders": "tokens of a forest",
    "MeasuredEdges": "made by the lm_head, for a measure",
    "MeasuredEdges.tokens_in": "a packed forest",
    "Images.from_batch(config)": "no number",
    "use_slime(args)": "slime's",
    "use_miles(args)": "miles'",
    "Images.from_batch(image_position_ids)": "read as grids are",
    "Images.from_batch(image_keys)": "any labels",
    "Images.from_batch(video_keys)": "any labels",
    "TreeMask.given_with": "of a packed forest",
    "TreeMask.is_given": "compared by memory",
    "TreeMask.adopt": "of a packed forest",
    "CostModel.from_config(config)": "no number",
    "CostModel.cost": "runs of a forest",
    "ImportCost.compute_seconds": "runs of a forest",
    "StateBorders": "tokens of a mask, in tests of its own",
    "tree_delta_rule(initial)": "goes with StateBorders",
    "tree_ssd(initial)": "goes with StateBorders",
    "ImportCost.exchange_seconds": "rows of parts",
    "PackedForest.selected_tokens": "for adapters: of flat_selection",
    "PackedForest.scored_tokens": "for adapters: of flat_selection",
    "PackedForest.copy_index": "for adapters: of flat_selection",
    "plot_mask(window)": "read by TreeMask.tables",
    "compile_layers": "options of torch.compile",
    "read_rollouts(watch)": "no number",
    "ImageBatch.model_inputs": "an index of a list",
    "ChatTokenizer.decode": "ids of its own",
    "ChatTokenizer.place": "ids of its own",
    "Draws.choose": "of a decode step",
    "sequence_logprobs(return_statistics)": "names",
    "kept_trunks(return_statistics)": "names",
    "kept_trunks(batches)": "of a plan",
    "kept_values(batches)": "of a plan",
    "batch_logprobs": "arrays of one shape, in tests of its own",
    "verify": "read by PrefixForest.from_sequences and sequence_logprobs",
}
# how a message names an argument, where it is a part that is wrong or another function reads it
NAMED = {
    "TreeSampler.sample(prompts)": "sequences",
    "Rows.append(tokens)": "tokens|row",
    "Rows.branch(counts)": "counts|row",
}
_NUMERIC = re.compile(
    r"\b(int|float|complex|Any|Sequence|Iterable|Mapping|Tensor|ndarray|Hashable)\b"
)


def parameters(name: str, call: Any) -> Iterator[tuple[str, bool]]:
    """The arguments of a call that may be numbers, and whether None is their default."""
    for p in inspect.signature(inspect.unwrap(call)).parameters.values():
        if p.name not in ("self", "cls") and _NUMERIC.search(str(p.annotation)):
            yield f"{name}({p.name})", p.default is None


def public_arguments() -> dict[str, bool]:
    found: dict[str, bool] = {}
    for dotted, thing in PUBLIC.items():
        name = dotted.rpartition(".")[2]
        if not inspect.isclass(thing):
            found |= parameters(name, thing)
            continue
        if name not in RESULTS and not issubclass(thing, Exception):
            found |= parameters(name, thing.__init__)
        for method, value in vars(thing).items():
            value = getattr(value, "__func__", value)
            if not method.startswith("_") and inspect.isfunction(value):
                found |= parameters(f"{name}.{method}", value)
    return found


ARGUMENTS = public_arguments()


def test_every_public_number_is_in_the_table() -> None:
    assert {"pack(pad_to_multiple_of)", "Rows.branch(counts)", "Draws(seed)"} <= set(ARGUMENTS)
    known = {*CASES, *ELSEWHERE}
    missing = [a for a in ARGUMENTS if a not in known and a.partition("(")[0] not in ELSEWHERE]
    assert not missing, f"add cases for {missing}, or say in ELSEWHERE why there are none"
    left = {name for name in ELSEWHERE if not any(a.startswith(name) for a in ARGUMENTS)}
    assert not left, f"there is no {left}"


@pytest.mark.parametrize("name", CASES)
def test_what_is_right_is_read_and_the_rest_refused_by_name(name: str) -> None:
    call, kind, few = CASES[name]
    names = NAMED.get(name) or name.partition("(")[2].rstrip("s)")
    for value in kind.right[:few]:
        call(value)
    for value in kind.wrong:
        if value is None and ARGUMENTS.get(name):
            continue
        try:
            call(value)
        except (ValueError, TypeError, IndexError) as error:
            said = f"{value!r}: {error}"
            assert re.search(rf"\b({names})", str(error)), said
            # one of ours, and not one of what would have met the value later
            assert "/prefixtree/" in traceback.extract_tb(error.__traceback__)[-1].filename, said
        else:
            pytest.fail(f"{name} takes {value!r}")
