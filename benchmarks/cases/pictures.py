"""How much faster is an update of a browser agent's turns, whose screenshots are encoded once?

    python -m benchmarks pictures --out pictures.json                       # on a GPU
    python -m benchmarks pictures --device cpu --scale 0.02 --repeats 1     # every code path

Forward and backward of the answers' log-probabilities through a model of Qwen3-VL-2B's shape with
random weights, bf16, weights and gradients but no optimizer state. The batch: three tasks, four
rollouts each, eight turns, a sample per turn. A turn is a screenshot of 44 x 80 patches and 160
tokens of text, of which the last 64 are the answer; a task's rollouts share its prompt of 800
tokens and the first two turns. So 96 samples hold 432 screenshots, 78 of them distinct, and 526,944
tokens, 83,667 of them distinct: the browser agent of docs/images.md at real sizes.

Sides: all, auto: the packed forest with `recompute=` so; checkpointing: the same with transformers'
gradient checkpointing; towers: the same, the tower run for every sample's screenshots anew; alone:
transformers' own forward with sdpa and gradient checkpointing, one sample after another;
auto-40: a plan that holds an update below 40 GiB, weights and gradients among them; compiled,
compiled-auto, compiled-auto-40: the same with `compile_layers`, always the last ones. All are
held against eager in float32 on a small batch through a few layers first; red has no times. At full
size the mean difference of log p from the side alone, where it ran, has a limit too, and the
gradients' distance is shown: in bf16 it is rounding. Out of memory is a row.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.lib.layers import checkpointed
from benchmarks.lib.runs import Report, Row, measure, parse, parser
from benchmarks.lib.tables import Column, Parts, Table, gib, machine, number, times_cell, verdict
from benchmarks.lib.tables import verdict_column as verdicts
from benchmarks.lib.timing import note_profile
from prefixtree import (
    Images,
    PackedForest,
    PrefixForest,
    RecomputePlan,
    compile_layers,
    pack,
    plan_recomputation,
    sequence_logprobs,
)
from prefixtree.images.encoder import in_few_calls
from prefixtree.images.vision import alone_inputs, encoder_of

# with what is recomputed
COMPILED = {"compiled": "all", "compiled-auto": "auto", "compiled-auto-40": "auto-40"}
SIDES = ("alone", "all", "auto", "auto-40", "checkpointing", "towers", *COMPILED)
# bytes that auto-40 plans with: what is predicted may be 5 % off
PLANNED = 38 << 30
# by transformers' own switch
CHECKPOINTED = ("alone", "checkpointing", "towers")
IMAGE, VIDEO, START, END = 5, 6, 7, 8
# mean difference of log p, in nats, that two sides in bf16 may have behind 28 random layers, as in
# the case `model`
DRIFT = 0.2
# relative differences that a side in float32 may have from eager in float32, on the small batch
LIMITS = {"log p": 1e-3, "text": 1e-3, "tower": 1e-3}
ENCODER = "model.visual."


@dataclass(frozen=True)
class Sizes:
    """The batch of a browser agent.

    Attributes:
        tasks, rollouts, turns: how many; rollouts are of a task, turns of a rollout.
        shared: the first turns, which a task's rollouts share.
        prompt, text, answer: tokens of a task's prompt, of the text of a turn, and of its answer,
            the last of these.
        grid: patches of a screenshot in height and width.
    """

    tasks: int = 3
    rollouts: int = 4
    turns: int = 8
    shared: int = 2
    prompt: int = 800
    text: int = 160
    answer: int = 64
    grid: tuple[int, int] = (44, 80)


SMALL = Sizes(2, 2, 3, 1, 9, 8, 4, (4, 8))


@dataclass(frozen=True)
class Batch:
    """Samples, one per turn.

    Attributes:
        sizes: what it was made of.
        pictures: of all samples; their sequences are the samples.
        packed: the forest, on the device.
        masks: bool [n] per sample, the answer of its last turn.
        weights: float32 per sample, of its log-probabilities in the loss.
    """

    sizes: Sizes
    images: Images
    packed: PackedForest
    masks: list[np.ndarray]
    weights: torch.Tensor

    @classmethod
    def of(cls, sizes: Sizes, config: Any, device: str) -> Batch:
        """Random tokens and pixels, the same in every run."""
        rng = np.random.default_rng(0)
        vision = config.vision_config
        height, width = sizes.grid
        values = 3 * vision.temporal_patch_size * vision.patch_size**2
        merged = vision.spatial_merge_size**2
        shown: list[torch.Tensor] = []

        def text(count: int) -> list[int]:
            return rng.integers(END + 1, config.text_config.vocab_size, count).tolist()

        def turn() -> tuple[list[int], int]:
            """Its tokens, and its screenshot's number."""
            generator = torch.Generator().manual_seed(len(shown))
            shown.append(torch.randn(height * width, values, generator=generator).bfloat16())
            tokens = [START, *[IMAGE] * (height * width // merged), END, *text(sizes.text)]
            return tokens, len(shown) - 1

        sequences: list[np.ndarray] = []
        held: list[int] = []
        for _ in range(sizes.tasks):
            prompt, shared = text(sizes.prompt), [turn() for _ in range(sizes.shared)]
            for _ in range(sizes.rollouts):
                turns = shared + [turn() for _ in range(sizes.turns - sizes.shared)]
                for last in range(1, sizes.turns + 1):
                    tokens = [prompt, *(tokens for tokens, _ in turns[:last])]
                    sequences.append(np.concatenate(tokens))
                    held += [image for _, image in turns[:last]]
        grids = torch.tensor([[1, height, width]]).expand(len(held), 3)
        pixels = [shown[image] for image in held]
        images = Images.from_batch(sequences, pixels, grids, config, image_keys=held)
        packed = pack(PrefixForest.from_sequences(images.sequences)).to(device)
        masks = [np.arange(len(s)) >= len(s) - sizes.answer for s in sequences]
        weights = rng.normal(size=len(sequences)) / (sizes.answer * len(sequences))
        return cls(sizes, images, packed, masks, torch.tensor(weights, dtype=torch.float32))

    def facts(self) -> Row:
        """How large it is."""
        images, forest = self.images, self.packed.forest
        return {
            "samples": len(images.sequences),
            "tokens": forest.num_replicated_tokens,
            "distinct_tokens": forest.num_tokens,
            "screenshots": images.num_given,
            "distinct_screenshots": len(images),
        }


def config_of(is_tiny: bool, layers: int | None = None, vocabulary: int = 151_936) -> Any:
    """Qwen3-VL-2B's shape, with --layers of text and of the tower, or a tiny one."""
    from transformers import Qwen3VLConfig

    text: dict[str, Any] = {
        "num_hidden_layers": layers or 28,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": vocabulary,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    }
    vision: dict[str, Any] = {
        "depth": layers or 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17] if layers is None else [0],
    }
    if is_tiny:
        text |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
        text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        text["vocab_size"] = 512
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [4, 2, 2]}
        vision |= {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
        vision |= {"out_hidden_size": 64, "patch_size": 4, "num_position_embeddings": 16}
        vision["deepstack_visual_indexes"] = [0]
    return Qwen3VLConfig(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=True,
        text_config=text,
        vision_config=vision,
    )


def model_of(config: Any, device: str, dtype: torch.dtype, attention: str = "prefixtree") -> Any:
    """Random weights, in training mode."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    # on the device, where drawing them takes no minutes
    with torch.device(device):
        model: Any = AutoModelForImageTextToText.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    return model.train()


# ---- sides ---------------------------------------------------------------------------------------


def learn(side: str, model: Any, batch: Batch) -> list[torch.Tensor]:
    """One forward and backward, or one per sample; -> log p of the answers, [answer] each.

    Args:
        side: of SIDES, or "eager", which does as alone does.
        model: after `set_up`.
    """
    if side in ("alone", "eager"):
        return _each_alone(model, batch)
    recompute: Any = None if side in CHECKPOINTED else COMPILED.get(side, side)
    if recompute == "auto-40":
        recompute = plan_within(PLANNED, model, batch)
    with _one_encoder_per_sample(model, batch) if side == "towers" else nullcontext():
        scores = sequence_logprobs(
            model,
            batch.packed,
            loss_mask=batch.masks,
            images=batch.images,
            recompute=recompute,
        ).logprobs
        answers = [row[-batch.sizes.answer :] for row in scores]
        sums = torch.stack([row.sum() for row in answers])
        (sums @ batch.weights.to(sums.device)).backward()
    return [row.detach() for row in answers]


def plan_within(limit: int, model: Any, batch: Batch) -> RecomputePlan:
    """A plan for an update in so many bytes, which the weights and their gradients take too."""
    taken = torch.cuda.memory_allocated() if batch.packed.device.type == "cuda" else 0
    missing = sum(p.nbytes for p in model.parameters() if p.grad is None)
    scored = batch.sizes.answer * len(batch.masks)
    memory = limit - taken - missing
    return plan_recomputation(model, batch.packed, memory, scored, images=batch.images)


def _each_alone(model: Any, batch: Batch) -> list[torch.Tensor]:
    found = []
    for i, tokens in enumerate(batch.images.sequences):
        inputs = alone_inputs(batch.images, tokens, batch.images.of_sequences[i])
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        answer = batch.sizes.answer
        target = inputs["input_ids"][0, -answer:]
        logits = model(**inputs, use_cache=False, logits_to_keep=answer + 1).logits[0, :-1]
        row = logits.float().log_softmax(-1).gather(-1, target[:, None])[:, 0]
        (row.sum() * batch.weights[i]).backward()
        found.append(row.detach())
    return found


@contextmanager
def _one_encoder_per_sample(model: Any, batch: Batch) -> Iterator[None]:
    """The tower encodes the screenshots of each sample anew, in one checkpoint per sample; the text
    takes the mean of the copies, which are equal. So each copy gets its share of the gradient."""
    encoder: Any = encoder_of(model)
    for module in encoder.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
    # once more in the backward, where the tower is as it was
    forward = in_few_calls(encoder)
    distinct = batch.images.distinct
    sizes = [image.run_tokens for image in distinct]

    def anew(pixels: torch.Tensor, grid_thw: torch.Tensor, **keywords: Any) -> Any:
        kind: list[Any] = []

        def encode(pixels: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
            output = forward(pixels, grid_thw=grids, **keywords)
            kind[:] = [type(output)]
            return [output.pooler_output, *output.deepstack_features]

        of_each = pixels.split([len(image.pixels) for image in distinct])
        copies: list[list[list[torch.Tensor]]] = [[] for _ in distinct]
        for numbers in batch.images.of_sequences:
            held = torch.cat([of_each[n] for n in numbers])
            got = checkpoint(encode, held, grid_thw[list(numbers)], use_reentrant=False)
            pieces = [features.split([sizes[n] for n in numbers]) for features in got]
            for at, n in enumerate(numbers):
                copies[n].append([piece[at] for piece in pieces])
        pooled, *deep = (
            torch.cat([torch.stack(layer).mean(0) for layer in layers])
            for layers in zip(*(list(zip(*each, strict=True)) for each in copies), strict=True)
        )
        return kind[0](pooler_output=pooled, deepstack_features=deep)

    encoder.forward = anew
    try:
        yield
    finally:
        del encoder.forward


# ---- checks --------------------------------------------------------------------------------------


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """On the CPU; zeros where there is none."""
    return {
        name: torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.to("cpu", copy=True)
        for name, p in model.named_parameters()
    }


def distances(found: Sequence[Any], expected: Sequence[Any]) -> Row:
    """Of (log p, gradients): the mean difference of log p, and the norms of the differences of text
    and tower over the norm of what was expected."""
    gap = torch.cat([(a - b).abs() for a, b in zip(found[0], expected[0], strict=True)])
    row: Row = {"log p": float(gap.mean())}
    for name in ("text", "tower"):
        of = [n for n in expected[1] if n.startswith(ENCODER) == (name == "tower")]
        apart, whole = (
            float(torch.stack([x.float().norm() for x in values]).norm())
            for values in (
                [found[1][n].float() - expected[1][n].float() for n in of],
                [expected[1][n] for n in of],
            )
        )
        row[name] = apart / whole
    return row


def run_once(side: str, model: Any, batch: Batch) -> tuple[list[torch.Tensor], Any]:
    """Log p and gradients of one update."""
    model.zero_grad(set_to_none=True)
    return learn(side, model, batch), gradients(model)


def set_up(model: Any, side: str) -> None:
    """With the attention of a side, transformers' own for alone, and with its checkpointing. A
    model that is compiled stays so."""
    model.set_attn_implementation("sdpa" if side == "alone" else "prefixtree")
    checkpointed(model)
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = side in CHECKPOINTED
    if side in COMPILED:
        compile_layers(model)


def full_float32() -> AbstractContextManager[None]:
    """Without TF32 in cuDNN, which rounds the patch embedding's gradient by default: of all
    samples' copies of a screenshot together on one side, of each copy on the other."""
    return torch.backends.cudnn.flags(allow_tf32=False)


def check_sides(options: argparse.Namespace) -> dict[str, Row]:
    """Each side in float32 on a small batch, against eager of each sample alone."""
    config = config_of(options.is_tiny, layers=2, vocabulary=4096)
    batch = Batch.of(SMALL, config, options.device)
    float32 = partial(model_of, config, options.device, torch.float32)
    with full_float32():
        expected = run_once("eager", float32("eager"), batch)
    out: dict[str, Row] = {}
    for side in options.sides:
        model = float32()
        set_up(model, side)
        with full_float32():
            found = distances(run_once(side, model, batch), expected)
        red = [
            f"{name} is {found[name]:.1e} from eager in float32, at most {limit:.0e}"
            for name, limit in LIMITS.items()
            if not found[name] <= limit
        ]
        out[side] = {"red": red} | {f"checked {name}": found[name] for name in LIMITS}
    return out


def run_side(side: str, model: Any, batch: Batch, known: Row, checked: Row, options: Any) -> Row:
    """Times one side; `known` keeps what the first side found for the others."""
    if checked["red"]:
        return checked
    set_up(model, side)
    row: Row = dict(checked)
    found = run_once(side, model, batch)
    if "found" in known:
        row |= distances(found, known["found"])
        if not row["log p"] <= DRIFT:
            row["red"] = [f"log p differs by {row['log p']:.3f} from {known['side']}"]
            return row
    else:
        known |= {"found": found, "side": side}
    del found
    if side.endswith("auto-40"):
        row["plan"] = str(plan_within(PLANNED, model, batch))
    # gradients stand, as after the first micro-batch of any step
    row |= measure(lambda: learn(side, model, batch), options)
    if options.profile is not None:
        note_profile(lambda: learn(side, model, batch), options.profile, side)
    return row


# ---- output --------------------------------------------------------------------------------------


def tables(*runs: Row) -> Parts:
    """A line per side of each run."""
    for data in runs:
        yield from _table(data)


def _table(data: Row) -> Parts:
    yield machine(data["environment"], "transformers")
    yield (
        f"{data['samples']} samples, {data['tokens']:,} tokens, {data['distinct_tokens']:,} "
        f"distinct; {data['screenshots']} screenshots, {data['distinct_screenshots']} distinct"
    )
    alone = next((row.get("ms") for row in data["rows"] if row["side"] == "alone"), None)

    def gained(row: Row) -> str:
        is_there = alone is not None and "ms" in row and row["side"] != "alone"
        return times_cell(alone / row["ms"]) if is_there and alone is not None else ""

    yield Table(
        [
            Column("side", lambda row: row["side"]),
            Column("s", lambda row: number(row, "seconds", ".2f")),
            Column("faster than alone", gained),
            Column("GiB", lambda row: gib(row.get("peak_with_held_bytes"))),
            *(
                Column(name, lambda row, name=name: number(row, name, ".1e"))
                for name in (*LIMITS, *(f"checked {name}" for name in LIMITS))
            ),
            verdicts(),
        ],
        [row | ({"seconds": row["ms"] / 1e3} if "ms" in row else {}) for row in data["rows"]],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was green."""
    what = parser(__doc__)
    what.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    what.add_argument("--turns", type=int, help="of a rollout; by default 8")
    what.add_argument("--profile", type=Path, help="top kernels of each side, a text file")
    options = parse(what, arguments)
    if options.read is not None:
        return Report.read(options).finish(tables)
    sizes = SMALL if options.is_tiny else Sizes()
    if options.turns:
        sizes = replace(sizes, turns=options.turns)
    config = config_of(options.is_tiny)
    batch = Batch.of(sizes, config, options.device)
    report = Report(options, **batch.facts())
    checks = check_sides(options)
    model = model_of(config, options.device, getattr(torch, options.dtype))
    known: Row = {}
    for side in sorted(options.sides, key=COMPILED.__contains__):
        one = partial(run_side, side, model, batch, known, checks[side], options)
        row = report.attempt({"side": side}, one)
        print(f"{side}: {verdict(row) or format(row['ms'] / 1e3, '.3f') + ' s'}", flush=True)
    return report.finish(tables)
