"""A case of `ways`, through public calls, and each of its sequences alone through eager.

    python -m tests.scoring.ways_runs COUNT [SEED]

draws that many cases at random, of one process, and prints those that fail.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import prefixtree as pt
from tests.scoring.ways import AXES, GROUPS, KEPT, STEPS, VALUES, goes, label
from tests.scoring.ways_models import LAYERS, model_of
from tests.support import image_cases
from tests.support.models import (
    enable_checkpointing,
    gradients,
    logprob_and_entropy,
    make_objective,
    ragged_sequences,
)
from tests.support.replay import drawn_routes, recorded_choice
from tests.support.step_ranks import LIGHT

MAX_STEP_TOKENS = 20
STATISTICS = ("mean_logits", "is_top1", "log_sum_sq_probs")
BALANCE = 0.5


class Stopped(Exception):
    """What a hook raises in the middle of a forward."""


@dataclass(frozen=True)
class Found:
    """What one side gives.

    Attributes:
        rows: [n - 1, columns] per sequence (of values [n, columns]), float64.
        gradients: by parameter, float64.
        balance: the load-balancing loss, of kept trunks the sum of those of micro-batches.
    """

    rows: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    balance: float = 0.0


# ---- inputs --------------------------------------------------------------------------------------


@cache
def images() -> Any:
    """The sequences with images."""
    return image_cases.batch(LAYERS["images"])


@dataclass(frozen=True)
class Inputs:
    """What is scored, and how: with `Objective`'s weights. sets: of tokens, empty for all of the
    vocabulary."""

    sequences: list[np.ndarray]
    temperatures: list[Any]
    masks: list[np.ndarray] | None
    sets: list[list[list[int]]] | None
    routes: list[np.ndarray] | None
    weights: list[torch.Tensor]

    def loss_of(self, i: int, rows: torch.Tensor) -> torch.Tensor:
        """Of sequence i; no sum over tokens. rows: [n, columns] or [n - 1, columns]."""
        weights = self.weights[i].to(rows)[: len(rows)]
        weights = (
            torch.cat([weights, weights[:1]])[: len(rows)] if len(rows) > len(weights) else weights
        )
        gains = torch.linspace(1.0, -0.5, rows.shape[1], dtype=rows.dtype)
        loss: torch.Tensor = (rows * weights[:, :1] * gains).sum() + 1e-3 * rows.sum().pow(2)
        return loss


@cache
def _text() -> list[np.ndarray]:
    """Two trees and a chain: a trunk of which sequences end and part twice."""
    sequences = ragged_sequences()
    return [sequences[i] for i in (0, 1, 3, 5, 8, 9, 10)]


@cache
def inputs_of(layers: str, scored: str) -> Inputs:
    sequences = images().sequences if layers == "images" else _text()
    drawn = make_objective(sequences)
    temperatures: list[Any] = [1.0] * len(sequences)
    if scored == "temperatures":
        rng = np.random.default_rng(1)
        per_token = [rng.choice([0.7, 1.0, 1.6], len(s)) for s in sequences]
        # numbers for some, arrays for others
        temperatures = [t if i % 2 else np.full(len(t), 0.8) for i, t in enumerate(per_token)]
    masks = drawn.loss_masks if scored in ("loss masks", "sampling masks") else None
    sets = None
    if scored == "sampling masks":
        temperatures = drawn.temperatures
        sets = [_sets(tokens, i % 2) for i, tokens in enumerate(sequences)]
    routes = drawn_routes(sequences) if scored == "routes" else None
    return Inputs(sequences, temperatures, masks, sets, routes, drawn.weights)


def _sets(tokens: np.ndarray, seed: int) -> list[list[int]]:
    """Of each token some ids, itself among them; none of placeholders and of high ids."""
    return [
        sorted(
            {token, *np.random.default_rng((seed, at)).integers(1, image_cases.IMAGE, 1 + at % 5)}
        )
        if token < image_cases.IMAGE
        else []
        for at, token in enumerate(tokens.tolist())
    ]


# ---- each sequence alone -------------------------------------------------------------------------


def alone(case: dict[str, str]) -> Found:
    """Each sequence in a forward of its own, without prefixtree."""
    way = case["way"]
    return _alone(way in VALUES, way in KEPT, *(case[axis] for axis in _DECIDE))


# the axes that decide what a sequence alone gives
_DECIDE = ("layers", "trained", "returned", "scored", "precision")


@cache
def _alone(of_values: bool, in_micro_batches: bool, *levels: str) -> Found:
    case = {
        "way": "values" if of_values else "one forward",
        **dict(zip(_DECIDE, levels, strict=True)),
    }
    model, inputs = model_of(case, "eager"), inputs_of(case["layers"], case["scored"])
    rows = []
    for i, tokens in enumerate(inputs.sequences):
        with _routed(model, inputs, i), _autocast(case):
            found = _rows_alone(case, model, inputs, i, tokens)
        if found.requires_grad:
            inputs.loss_of(i, found).backward()
        rows.append(found.detach().double())
    balance = 0.0
    if case["returned"] == "router loss":
        with _autocast(case):
            loss = _balance_alone(model, inputs, in_micro_batches)
        if loss.requires_grad:
            (BALANCE * loss).backward()
        balance = float(loss.detach())
    return Found(rows, _gradients(model), balance)


def _routed(model: Any, inputs: Inputs, i: int) -> Any:
    """Routers choose what is recorded of sequence i; without checkpoints they do not choose again
    behind this block."""
    return nullcontext() if inputs.routes is None else recorded_choice(model, inputs.routes[i])


def _balance_alone(model: Any, inputs: Inputs, in_micro_batches: bool) -> torch.Tensor:
    """transformers' load-balancing loss over the tokens of all sequences, or the sum of those over
    the tokens of each micro-batch."""
    logits = []
    for i, tokens in enumerate(inputs.sequences):
        with _routed(model, inputs, i):
            ids = torch.from_numpy(tokens)[None]
            output = model(input_ids=ids, use_cache=False, output_router_logits=True)
        logits.append(output.router_logits)
    together = [list(range(len(logits)))]
    if in_micro_batches:
        plan = kept_plan(forest_of(inputs, inputs.sequences))
        together = [batch.sequence_indices.tolist() for batch in plan[0]]
    choices = model.config.num_experts, model.config.num_experts_per_tok
    return sum(
        load_balancing_loss_func(
            tuple(torch.cat(layer) for layer in zip(*(logits[i] for i in of), strict=True)),
            *choices,
        )
        for of in together
    )


def _rows_alone(
    case: dict[str, str], model: Any, inputs: Inputs, i: int, tokens: np.ndarray
) -> torch.Tensor:
    ids = torch.from_numpy(tokens)
    keywords: dict[str, Any] = {"input_ids": ids[None]}
    if case["layers"] == "images":
        shown = image_cases.images_of(model, images())
        keywords = image_cases.alone_inputs(shown, shown.sequences[i], shown.of_sequences[i])
        ids = keywords["input_ids"][0]
    if case["way"] in VALUES:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        hidden = inner.base_model(**keywords, use_cache=False).last_hidden_state
        values: torch.Tensor = inner.score(hidden)[0]
        return values
    logits = model(**keywords, use_cache=False).logits[0, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    temperature = torch.as_tensor(inputs.temperatures[i])
    temperature = temperature[1:, None].to(logits) if temperature.ndim else temperature
    logits = logits / temperature
    log_p = logits.log_softmax(-1)
    taken = whole = log_p.gather(1, ids[1:, None])[:, 0]
    entropy = of_whole = -(log_p.exp() * log_p).sum(-1)
    if inputs.sets is not None:
        is_kept = torch.tensor(
            [[not s or v in s for v in range(len(logits[0]))] for s in inputs.sets[i]]
        )
        over = logits.masked_fill(~is_kept[1:], -torch.inf).log_softmax(-1)
        taken = over.gather(1, ids[1:, None])[:, 0]
        entropy = -(over.exp() * over.masked_fill(~is_kept[1:], 0.0)).sum(-1)
    statistics = [
        x.detach().to(taken)
        for x in (logits.mean(-1), logits.argmax(-1) == ids[1:], (2 * log_p).logsumexp(-1))
    ]
    columns = {
        "log p": [taken],
        "router loss": [taken],
        "entropies": [taken, entropy],
        "measure": [taken, whole, of_whole],
        "statistics": [taken, *statistics],
        "entropies and statistics": [taken, entropy, *statistics],
    }[case["returned"]]
    rows = torch.stack(columns, -1)
    if inputs.masks is not None:
        rows = rows * torch.from_numpy(inputs.masks[i][1:, None])
    return rows


# ---- the case ------------------------------------------------------------------------------------


# each image is a run of a vision encoder
@patch("prefixtree.images.vision.RUN", 1)
def run(case: dict[str, str], group: Any = None) -> Found:
    """The case through prefixtree. group: of the ranks, for the ways of groups."""
    model = pt.prepare(model_of(case))
    _recompute(model, case["recomputed"])
    inputs = inputs_of(case["layers"], case["scored"])
    call = Call(case, model, inputs, group)
    event = case["event"]
    if event == "empty batch before":
        call.nothing()
    elif event == "exception in the middle":
        with _stopping(model):
            try:
                call()
            except Stopped:
                pass
            else:
                raise AssertionError("the hook did not stop the forward")
        model.zero_grad(set_to_none=True)
    elif event == "no_grad before":
        with torch.no_grad():
            before = call()
        assert not before.gradients
        found = call()
        assert rows_apart(before, found) <= tolerance(case)
        return found
    if event == "two calls in flight":
        halves = [call.scores(), call.scores()]
        for rows, balance in halves:
            call.backward(rows, balance, 0.5)
        rows, balance = halves[0]
        return call.found(dict(enumerate(rows)), balance)
    return call()


def _recompute(model: Any, how: str) -> None:
    if how == "compiled layers":
        torch._dynamo.reset()
        pt.compile_layers(model, backend="eager")
    elif "checkpointing" in how:
        enable_checkpointing(model, how.startswith("reentrant"))


@contextmanager
def _stopping(model: nn.Module) -> Iterator[None]:
    """The last attention or state layer raises, the first time."""

    def stop(*_: Any) -> None:
        raise Stopped

    name = max(n for n, _ in model.named_modules() if n.rpartition(".")[0].endswith("layers"))
    handle = dict(model.named_modules())[name].register_forward_hook(stop)
    try:
        yield
    finally:
        handle.remove()


# the keywords of `sequence_logprobs` and `kept_trunks`
_ASKED: dict[str, dict[str, Any]] = {
    "log p": {},
    "entropies": {"return_entropy": True},
    "statistics": {"return_statistics": STATISTICS},
    "entropies and statistics": {"return_entropy": True, "return_statistics": STATISTICS},
    "measure": {"measure": logprob_and_entropy},
    "router loss": {"output_router_logits": True},
}


def forest_of(inputs: Inputs, tokens: Sequence[np.ndarray]) -> pt.PrefixForest:
    """With the routes of its tokens, where these are recorded."""
    more = {} if inputs.routes is None else {"routes": inputs.routes}
    return pt.PrefixForest.from_sequences(tokens, **more)


def kept_plan(forest: pt.PrefixForest, budget: int = 24, **options: Any) -> pt.MicroBatchPlan:
    """Micro-batches that keep trunks."""
    plan = pt.plan_micro_batches(forest, budget, trunks=True, import_cost=LIGHT, **options)
    assert plan.stats.trunks.trunks > 0
    return plan


class Call:
    """The way's public call, and the backward of its loss."""

    def __init__(self, case: dict[str, str], model: Any, inputs: Inputs, group: Any) -> None:
        self.case, self.model, self.inputs, self.group = case, model, inputs, group
        self.way = case["way"]
        self.options: dict[str, Any] = {}
        if case["recomputed"] in ("nothing", "all", "all_but_attention", "auto"):
            self.options["recompute"] = case["recomputed"]
        self.tokens = list(inputs.sequences)
        if case["layers"] == "images":
            shown = image_cases.images_of(model, images())
            self.options["images"], self.tokens = shown, shown.sequences
        if self.way not in VALUES:
            self.options["chunk_size"] = 7
            self.options |= _ASKED[case["returned"]]
            self.options["sampling_masks"] = inputs.sets
        if self.way in STEPS:
            self.options |= {"max_step_tokens": MAX_STEP_TOKENS, "import_cost": LIGHT}
        if self.way in GROUPS:
            mode = "ulysses" if self.way.endswith("heads") else "parts"
            self.options |= {"group": group, "group_mode": mode}
        elif self.way == "again":
            self.options["recompute_trunks"] = "again"

    def forest(self) -> pt.PrefixForest:
        return forest_of(self.inputs, self.tokens)

    def __call__(self) -> Found:
        if self.way in KEPT:
            return self._kept(self._plan()[0])
        rows, balance = self.scores()
        self.backward(rows, balance)
        return self.found(dict(enumerate(rows)), balance)

    def scores(self) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Rows per sequence, with a graph."""
        with _autocast(self.case):
            return self._scored(pt.pack(self.forest()))

    def _scored(self, packed: pt.PackedForest) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        if self.way in VALUES:
            return pt.sequence_values(self.model, packed, **self.options), None
        per_sequence, options = (self.inputs.temperatures, self.inputs.masks), self.options
        if packed.forest.num_sequences != len(self.tokens):
            # of an empty batch
            per_sequence, options = (1.0, None), {**options, "sampling_masks": None}
        scores = pt.sequence_logprobs(self.model, packed, *per_sequence, **options)
        return self._rows(scores), scores.aux_loss

    def nothing(self) -> None:
        """What an empty batch adds to gradients: nothing."""
        if self.way in KEPT:
            self._kept(self._plan(num_ranks=2, min_micro_batches=9)[1])
            self.model.zero_grad(set_to_none=True)
            return
        empty = _empty(self.forest())
        with _autocast(self.case):
            rows, balance = self._scored(empty)
        loss = sum(row.sum() for row in rows) if self.way not in VALUES else 0.0 * rows[0].sum()
        if balance is not None:
            assert not balance.detach().any()
            loss = loss + balance
        if loss.requires_grad:
            loss.backward()
        assert not any(g.any() for g in _gradients(self.model).values())

    def backward(
        self, rows: Sequence[torch.Tensor], balance: torch.Tensor | None, scale: float = 1.0
    ) -> None:
        loss: Any = sum(self.inputs.loss_of(i, row) for i, row in enumerate(rows))
        if balance is not None:
            loss = loss + BALANCE * balance
        if "checkpointing" not in self.case["recomputed"]:
            # transformers may ask inputs of checkpoints for a gradient
            trains = torch.is_grad_enabled() and self.case["trained"] != "no parameter"
            assert loss.requires_grad == trains
        if loss.requires_grad:
            (scale * loss).backward()

    def found(self, rows: dict[int, torch.Tensor], balance: torch.Tensor | None) -> Found:
        return Found(
            [rows[i].detach().double() for i in sorted(rows)],
            _gradients(self.model),
            0.0 if balance is None else float(balance.detach()),
        )

    # ---- kept trunks

    def _plan(self, **options: Any) -> pt.MicroBatchPlan:
        return kept_plan(self.forest(), 24 if self.case["layers"] != "images" else 40, **options)

    def _kept(self, batches: Any) -> Found:
        rows: dict[int, torch.Tensor] = {}
        balance = torch.zeros(())
        values = self.way in VALUES
        kept: Any = pt.kept_values if values else pt.kept_trunks
        if not values:
            kept = partial(kept, temperature=self.inputs.temperatures, loss_mask=self.inputs.masks)
        with _autocast(self.case), kept(self.model, batches, **self.options) as scored:
            for batch, scores in scored:
                its = scores if values else self._rows(scores)
                pairs = dict(zip(batch.sequence_indices.tolist(), its, strict=False))
                rows |= pairs
                loss = sum(self.inputs.loss_of(i, row) for i, row in pairs.items())
                if batch.is_empty:
                    loss = sum(row.sum() for row in its) * 0.0
                if self.case["returned"] == "router loss":
                    balance = balance + scores.aux_loss.detach()
                    loss = loss + BALANCE * scores.aux_loss
                if loss.requires_grad:
                    loss.backward()
        return self.found(rows, balance)

    def _rows(self, scores: Any) -> list[torch.Tensor]:
        found = [[p] for p in scores.logprobs]
        if scores.entropy is not None:
            found = [[*of, e] for of, e in zip(found, scores.entropy, strict=True)]
        for name in self.options.get("return_statistics", ()):
            found = [[*of, s] for of, s in zip(found, scores.statistics[name], strict=True)]
        if scores.measured is not None:
            found = [[*of, *m.unbind(-1)] for of, m in zip(found, scores.measured, strict=True)]
        return [torch.stack(of, -1) for of in found]


def _autocast(case: dict[str, str]) -> Any:
    if case["precision"] == "bfloat16 autocast":
        return torch.autocast("cpu", torch.bfloat16)
    return nullcontext()


def _empty(forest: pt.PrefixForest) -> pt.PackedForest:
    """An empty step of a plan."""
    plan = pt.plan_micro_batches(forest, 10_000, num_ranks=2, min_micro_batches=40)
    return next(b for rank in range(2) for b in plan[rank] if b.is_empty).packed


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """By the name without wrappers' prefixes."""
    return {name: g.double() for name, g in gradients(model).items()}


# ---- comparison ----------------------------------------------------------------------------------


def check(case: dict[str, str], found: Found) -> None:
    """Fails unless a case gives what each of its sequences gives alone.

    Under autocast both round: then each is compared with float32, and the packed run may be twice
    as far away as the sequences alone are.
    """
    expected = alone(case)
    if case["precision"] != "bfloat16 autocast":
        far = distance(found, expected)
        assert far <= tolerance(case), far
        return
    exact = alone({**case, "precision": "float32"})
    far, rounding = mean_distance(found, exact), mean_distance(expected, exact)
    assert far <= 2 * rounding + 1e-3, (far, rounding)


def tolerance(case: dict[str, str]) -> float:
    """Of `distance`: a bound of rounding. States are read through exponentials of sums, and V4's
    hyper-connections nearly cancel. Adapters beside 4 bits have the smallest gradients."""
    rounds = ("delta rule", "Mamba-2", "convolutions", "compressed keys")
    if case["layers"] in rounds or case["trained"] == "QLoRA":
        return 5e-5
    # scores are float32 of models in float64 too
    return 3e-6 if case["precision"] == "float64" else 1e-5


def distance(found: Found, expected: Found) -> float:
    """The largest difference: of rows over the largest row, of a parameter's gradient over its
    norm; a norm below 1e-3 of all gradients counts as that."""
    _check_shapes(found, expected)
    norms = {name: float(g.norm()) for name, g in expected.gradients.items()}
    floor = 1e-3 * sum(norm**2 for norm in norms.values()) ** 0.5 or 1.0
    gaps = (
        float((found.gradients[name] - g).norm()) / max(norms[name], floor)
        for name, g in expected.gradients.items()
    )
    return max([rows_apart(found, expected), *gaps])


def rows_apart(found: Found, expected: Found) -> float:
    """The largest difference of rows over the largest row, and of the load-balancing loss."""
    rows, wanted = torch.cat(found.rows), torch.cat(expected.rows)
    largest = float((rows - wanted).abs().max() / wanted.abs().max())
    return max(largest, abs(found.balance - expected.balance))


def mean_distance(found: Found, expected: Found) -> float:
    """The larger of two root mean squares: of rows, and of all gradients, over those expected."""
    _check_shapes(found, expected)
    pairs = (
        (torch.cat([x.flatten() for x in a]), torch.cat([x.flatten() for x in b]))
        for a, b in (
            (found.rows, expected.rows),
            (
                [torch.empty(0), *(found.gradients[name] for name in expected.gradients)],
                [torch.empty(0), *expected.gradients.values()],
            ),
        )
    )
    # nothing trains: no gradients
    return max(float((a - b).norm() / b.norm()) for a, b in pairs if len(b))


def _check_shapes(found: Found, expected: Found) -> None:
    assert [r.shape for r in found.rows] == [e.shape for e in expected.rows]
    assert found.gradients.keys() == expected.gradients.keys()
    for each in (found, expected):
        assert all(x.isfinite().all() for x in (*each.rows, *each.gradients.values()))
        assert np.isfinite(each.balance)


# ---- cases at random -----------------------------------------------------------------------------


def drawn(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Cases of which no pair and no three are refused."""
    rng = np.random.default_rng(seed)
    while count:
        case = {axis: str(rng.choice(levels)) for axis, levels in AXES.items()}
        if goes(case) and case["way"] not in GROUPS:
            count -= 1
            yield case


def main(count: str, seed: str = "0") -> int:
    warnings.simplefilter("ignore")
    failed = 0
    for case in drawn(int(count), int(seed)):
        try:
            check(case, run(case))
        except Exception as error:
            failed += 1
            print(f"{label(case)}: {type(error).__name__}: {error}", flush=True)
    print(f"{failed} of {count} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
