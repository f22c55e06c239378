"""Tiny models of the families of `family_configs`, and the replicated run that packed runs are
compared with.

The replicated side uses nothing of prefixtree: each sequence alone through the eager model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from packaging import version
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)

from prefixtree import PackedForest, PrefixForest, pack, prepare
from prefixtree.kernels.lm_head.measures import MeasuredEdges
from prefixtree.models.family_table import has_indexers
from prefixtree.scoring import forward as scoring
from prefixtree.scoring.logprobs import SequenceScores, sequence_logprobs
from tests.support.family_configs import FAMILIES, TINY, VOCABULARY
from tests.support.family_configs import (
    HIDDEN as HIDDEN,
)
from tests.support.full import mostly
from tests.support.hooks import place
from tests.support.hybrid_configs import HYBRIDS, OLDEST_WITH_STATES, SINCE
from tests.support.variant_configs import BROKEN_BELOW, REFUSED_BELOW, VARIANTS

# image encoders, with what turns their outputs into embeddings
ENCODERS = (
    *("model.visual.", "model.vision_tower.", "model.embed_vision."),
    "model.multi_modal_projector.",
)

# the transformers that is installed
TRANSFORMERS = version.parse(transformers.__version__)
# its name for keys and values of earlier calls, as an argument and in what a model returns
CACHE = "cache" if version.parse("5.24") <= TRANSFORMERS else "past_key_values"


def cases(names: Iterable[str]) -> list[Any]:
    """Names of families (or variants) as parameters of a test; what the installed transformers
    does not have or cannot run is skipped with the reason."""
    return [pytest.param(name, marks=skips_of(name)) for name in names]


# one per kind of operator and of layer code: attention with and without windows, sinks, latent
# attention, experts (one type's look at numbers), and every recurrence
EVERY_TIME = {
    *("qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_moe", "longcat_flash"),
    *("qwen3_5", "kimi_linear", "nemotron_h", "lfm2"),
}


def mostly_full(names: Iterable[str], but: set[str] = EVERY_TIME) -> list[Any]:
    """`cases` of a test that takes long in all families: all `but` a few run with --full alone."""
    return mostly(cases(names), but)


def skips_of(name: str) -> list[Any]:
    """The marks of a family that the installed transformers lacks or cannot run."""
    model_type = name.partition("/")[0]
    needs = BROKEN_BELOW.get(name) or REFUSED_BELOW.get(model_type)
    if model_type in HYBRIDS:
        needs = SINCE.get(model_type, OLDEST_WITH_STATES)
    if model_type not in CONFIG_MAPPING:
        reason = f"transformers {TRANSFORMERS} has no {model_type}"
    elif needs is not None and version.parse(needs) > TRANSFORMERS:
        reason = f"{name} needs transformers {needs}, this is {TRANSFORMERS}"
    else:
        return []
    return [pytest.mark.skip(reason=reason)]


def build(
    model_type: str, implementation: str = "prefixtree", seed: int = 0, **changes: Any
) -> Any:
    """A tiny model in training mode with parameters that all matter, of a family or a variant."""
    return made_of(model_type, tiny_config(model_type, **changes), implementation, seed)


def ready(model: Any) -> Any:
    """A model for a bare call over a forest: one with indexers is prepared first."""
    return prepare(model) if has_indexers(model.config) else model


def reward_model(model_type: str, implementation: str = "prefixtree", labels: int = 2) -> Any:
    """A sequence classifier in training mode, as `build` makes it."""
    config = build(model_type, num_labels=labels).config
    model = AutoModelForSequenceClassification.from_config(
        config, attn_implementation=implementation
    )
    randomise(model)
    return model.train()


def tiny_config(name: str, **changes: Any) -> dict[str, Any]:
    """The keywords of the tiny configuration of a family or a variant, its text's changed."""
    config = copy.deepcopy(VARIANTS.get(name) or FAMILIES.get(name, {}))
    if "text_config" in config:
        config["text_config"] |= changes
    else:
        config = {**TINY, **config, **changes}
    found: dict[str, Any] = as_lists(config)
    return found


def made_of(
    name: str, config: dict[str, Any], implementation: str = "prefixtree", seed: int = 0
) -> Any:
    """A model as `build` makes it, of the keywords of a configuration."""
    auto: Any = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    model = auto.from_config(
        AutoConfig.for_model(name.partition("/")[0], **config), attn_implementation=implementation
    )
    randomise(model, seed)
    return model.train()


def as_lists(config: Any) -> Any:
    """A configuration with lists for its tuples, made anew: transformers changes them in place."""
    if isinstance(config, dict):
        return {name: as_lists(value) for name, value in config.items()}
    return list(config) if isinstance(config, tuple) else config


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Norm weights near 1, all else (biases, sinks, routers) 0.15 randn: nothing at a neutral 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(noise + ("norm" in name and name.endswith("weight")))
            if name.endswith("A_log"):
                # states that keep between half and nearly all of themselves per token
                parameter.sub_(1.5 + 8 * noise.abs())
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            # takes part in the choice of experts alone; small, or some are never chosen
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.02)
            if name.endswith("tid2eid"):
                # the experts of a token, all different
                drawn = torch.rand(len(tensor), 4, generator=generator)
                tensor.copy_(drawn.argsort(1)[:, : tensor.shape[1]])


class AdaptedHead(nn.Module):
    """A low-rank adapter around the head, which stays inside as `base_layer`, as PEFT has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.base_layer = base
        self.down = nn.Parameter(torch.randn(4, base.in_features, generator=g) * 0.3)
        self.up = nn.Parameter(torch.randn(base.out_features, 4, generator=g) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.down.t() @ self.up.t()


def adapted(model: nn.Module, *targets: str) -> Any:
    """With a LoRA adapter of random weights on modules of these names, in training mode."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[*targets]))
    # B starts at 0, where A has no gradient
    randomise(model)
    return model.train()


def quantised(model: Any, **settings: Any) -> Any:
    """A model in training mode whose checkpoint bitsandbytes quantised, with the attention it has.

    settings: of BitsAndBytesConfig. Default: 4 bits.
    """
    pytest.importorskip("bitsandbytes")
    settings = settings or {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    with TemporaryDirectory() as folder:
        # of ranks, save_pretrained writes on the first alone
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), f"{folder}/pytorch_model.bin")
        return (
            type(model)
            .from_pretrained(
                folder,
                quantization_config=BitsAndBytesConfig(**settings),
                attn_implementation=model.config._attn_implementation,
                device_map="cpu",
                dtype=torch.float32,
            )
            .train()
        )


def with_random_lora(model: nn.Module, *targets: str, **options: Any) -> Any:
    """With adapters of random weights; the model's own, which may be quantised, stay."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=[*targets], init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).train()


def text_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that text trains: not those of image encoders or indexers, nor frozen ones."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        # transformers trains no indexer
        if parameter.requires_grad and not name.startswith(ENCODERS) and ".indexer." not in name
    }


def attentions(model: nn.Module) -> list[nn.Module]:
    """The self-attention of every layer of the text model."""
    return [m for m in model.modules() if hasattr(m, "is_causal") and m.is_causal]


def recurrent(model: nn.Module) -> list[nn.Module]:
    """The layers that carry a state: all of them convolve first."""
    return [m for m in model.modules() if any(isinstance(c, nn.Conv1d) for c in m.children())]


def tolerance(model_type: str) -> float:
    """Of `assert_same`. States are read through norms and exponentials of sums, and gradients of
    DeepSeek V4's hyper-connections nearly cancel: both blow rounding up in eager runs as well. That
    they are exact is proven in float64 (test_hybrids.py, test_indexers.py)."""
    return 5e-5 if model_type in (*HYBRIDS, "deepseek_v4") else 1e-5


def enable_checkpointing(model: Any, use_reentrant: bool) -> None:
    """Checkpoints every decoder layer; the method's name changed within the supported range."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        enable = model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


def ragged_sequences(seed: int = 0) -> list[np.ndarray]:
    """Two trees, the first 5 nodes deep, and a separate chain: with sequences that end inside a
    tree, one that is repeated, a one-token node, and branches behind a branch."""
    rng = np.random.default_rng(seed)

    def run(length: int) -> np.ndarray:
        return rng.integers(3, VOCABULARY, length)

    root, first, second, third = run(9), run(7), run(11), run(5)
    one, deep, other = run(1), run(8), run(6)
    paths = [
        [root, first, second],
        [root, first],
        [root, first, third, second],
        [root, third],
        [root, first, second],
        [other, one],
        [root, first, second[:4], third],
        [root, first, second, deep, one],
        [root, first, second, deep, third],
        [other, third, one],
        [run(10)],
        [root, first, one],
    ]
    return [np.concatenate(path) for path in paths]


@dataclass(frozen=True)
class Objective:
    """Sum of a log p + b entropy over the scored tokens, with weights of all sizes and both signs,
    and the load-balancing loss of one padded batch of all sequences.

    Attributes:
        sequences: token ids.
        temperatures: one per sequence, or [n] each.
        loss_masks: [n] each, or None.
        weights: [n - 1, 2] each: a and b.
        balance: the coefficient of the load-balancing loss; 0 leaves it out.
    """

    sequences: list[np.ndarray]
    temperatures: list[Any]
    loss_masks: list[np.ndarray] | None
    weights: list[torch.Tensor]
    balance: float = 0.0

    def loss(self, logprobs: Sequence[Any], entropy: Sequence[Any]) -> torch.Tensor:
        """The objective's value."""
        weights = (w.to(p.device) for w, p in zip(self.weights, logprobs, strict=True))
        terms = zip(logprobs, entropy, weights, strict=True)
        return sum((p * w[:, 0]).sum() + (e * w[:, 1]).sum() for p, e, w in terms)


def make_objective(sequences: list[np.ndarray], seed: int = 0, plain: bool = False) -> Objective:
    """Three temperatures and masks that differ between sequences; all 1 if plain."""
    rng = np.random.default_rng(seed)
    weights = [torch.from_numpy(rng.standard_normal((len(s) - 1, 2))).float() for s in sequences]
    masks = [(rng.random(len(s)) < 0.75).astype(np.int64) for s in sequences]
    temperatures = [(1.0, 0.7, 1.0, 1.6)[i % 4] for i in range(len(sequences))]
    if plain:
        return Objective(sequences, [1.0] * len(sequences), None, weights)
    return Objective(sequences, temperatures, masks, weights)


@cache
def ragged_objective() -> Objective:
    """The objective of the ragged sequences, made once."""
    return make_objective(ragged_sequences())


def pack_sequences(sequences: Sequence[Any]) -> PackedForest:
    """The forest of token sequences, packed."""
    return pack(PrefixForest.from_sequences(sequences))


@cache
def ragged_packed() -> PackedForest:
    """The ragged sequences packed, once."""
    return pack_sequences(ragged_objective().sequences)


@dataclass(frozen=True)
class Run:
    """The results of one side."""

    logprobs: list[torch.Tensor]
    entropy: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def run_replicated(model: Any, objective: Objective) -> Run:
    """Every sequence alone through the model; gradients add up over the sequences."""
    model.zero_grad(set_to_none=True)
    device = next(model.parameters()).device
    logprobs, entropy = [], []
    for i, tokens in enumerate(objective.sequences):
        ids = torch.from_numpy(tokens).to(device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        temperature = torch.as_tensor(objective.temperatures[i], device=device)
        if temperature.ndim:
            # the first token was not drawn
            temperature = temperature[1:, None].float()
        log_p = (logits.float() / temperature).log_softmax(-1)
        scored = torch.ones(len(tokens) - 1, device=device)
        if objective.loss_masks is not None:
            scored = torch.from_numpy(objective.loss_masks[i][1:]).to(scored)
        logprobs.append(log_p.gather(1, ids[1:, None])[:, 0] * scored)
        entropy.append(-(log_p.exp() * log_p).sum(-1) * scored)
    objective.loss(logprobs, entropy).backward()
    if objective.balance:
        balance = objective.balance * padded_balancing_loss(model, objective.sequences)
        # routers may stand below all that trains
        if balance.requires_grad:
            balance.backward()
    return Run(_detached(logprobs), _detached(entropy), gradients(model))


def padded_balancing_loss(model: Any, sequences: Sequence[np.ndarray]) -> torch.Tensor:
    """The load-balancing loss that transformers computes for one padded batch."""
    lengths = [len(s) for s in sequences]
    device = next(model.parameters()).device
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.long)
    ids[mask] = torch.from_numpy(np.concatenate(sequences))
    inputs = {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}
    output = model(**inputs, use_cache=False, output_router_logits=True)
    loss: torch.Tensor = output.aux_loss
    return loss


def run_eager(model: Any, objective: Objective | None = None) -> Run:
    """The reference of a model that runs prefixtree: a copy of it, eager."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    return run_replicated(model, objective or ragged_objective())


def run_packed(
    model: nn.Module,
    packed: Any,
    objective: Objective,
    chunk_size: int | None = 7,
    recompute: Any = None,
    scale: float = 1.0,
    measured: bool = False,
    **options: Any,
) -> Run:
    """The same through `sequence_logprobs`; the loss is `scale` times the objective. Three quarters
    of each score come from a measure where `measured`."""
    model.zero_grad(set_to_none=True)
    scores = sequence_logprobs(
        model,
        packed,
        temperature=objective.temperatures,
        loss_mask=objective.loss_masks,
        return_entropy=True,
        chunk_size=chunk_size,
        recompute=recompute,
        output_router_logits=bool(objective.balance) or None,
        measure=logprob_and_entropy if measured else None,
        **options,
    )
    scores = with_measured(scores)
    backward_of(objective, scores, scale)
    assert scores.entropy is not None
    return Run(_detached(scores.logprobs), _detached(scores.entropy), gradients(model))


def logprob_and_entropy(logits: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
    """A measure whose values are known."""
    log_p = logits.log_softmax(-1)
    taken = log_p.gather(1, edges.token[:, None])[:, 0]
    return torch.stack([taken, -(log_p.exp() * log_p).sum(-1)], -1)


def numbers_and_logprob(logits: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
    """The numbers of the edges, log p of token 7, and their tokens in the ragged forest."""
    numbers = edges.edge, edges.scored_edge, logits.log_softmax(-1)[:, 7]
    numbers = *numbers, edges.tokens_in(ragged_packed())
    return torch.stack([n.float() for n in numbers], -1)


def with_measured(scores: SequenceScores) -> SequenceScores:
    """Scores of which three quarters come from `logprob_and_entropy`, if it was the measure; each
    part has its share of the gradient."""
    if scores.measured is None:
        return scores
    assert scores.entropy is not None

    def mixed(values: list[torch.Tensor], column: int) -> list[torch.Tensor]:
        assert scores.measured is not None
        pairs = zip(values, scores.measured, strict=True)
        return [0.25 * v + 0.75 * m[:, column] for v, m in pairs]

    return replace(scores, logprobs=mixed(scores.logprobs, 0), entropy=mixed(scores.entropy, 1))


def backward_of(objective: Objective, scores: SequenceScores, scale: float = 1.0) -> None:
    """The backward of `scale` times an objective, from the scores of a packed forest."""
    assert scores.entropy is not None
    loss = objective.loss(scores.logprobs, scores.entropy)
    if objective.balance:
        assert scores.aux_loss is not None
        loss = loss + objective.balance * scores.aux_loss
    (scale * loss).backward()


def let_wrong_masks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the count of attention calls, which stops wrong masks before the test's check."""
    monkeypatch.setattr(scoring, "every_layer_attends", lambda *_: nullcontext())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies, by parameter name; parameters without a gradient are left out."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _detached(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach() for t in tensors]


@dataclass(frozen=True)
class Errors:
    """How far a run is from the reference.

    Attributes:
        logprob: largest difference of a log-probability, over the largest |log p| of the reference.
        entropy: likewise.
        gradient: over the parameters, the largest norm of the difference over the norm of the
            reference's gradient; a norm below 1e-3 of the norm of all gradients counts as that.
        worst: the parameter `gradient` belongs to.
    """

    logprob: float
    entropy: float
    gradient: float
    worst: str

    @property
    def largest(self) -> float:
        """The largest of the three."""
        return max(self.logprob, self.entropy, self.gradient)


def errors(run: Run, reference: Run) -> Errors:
    """Differences of a run from the reference; an assertion if the two do not even have the same
    shapes, the same parameters with gradients, or finite values."""

    def worst_value(values: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
        assert [v.shape for v in values] == [e.shape for e in expected]
        flat, target = torch.cat(values), torch.cat(expected)
        assert flat.dtype == target.dtype == torch.float32
        assert flat.isfinite().all()
        return float((flat - target).abs().max() / target.abs().max())

    assert run.gradients.keys() == reference.gradients.keys()
    norms = {name: float(g.float().norm()) for name, g in reference.gradients.items()}
    # a factor of 0 leaves no gradient at all
    floor = 1e-3 * sum(norm**2 for norm in norms.values()) ** 0.5 or 1.0
    worst, worst_name = 0.0, ""
    for name, expected in reference.gradients.items():
        got = run.gradients[name].float()
        assert got.isfinite().all(), name
        error = float((got - expected.float()).norm()) / max(norms[name], floor)
        if error >= worst:
            worst, worst_name = error, name
    return Errors(
        worst_value(run.logprobs, reference.logprobs),
        worst_value(run.entropy, reference.entropy),
        worst,
        worst_name,
    )


def assert_same(run: Run, reference: Run, tolerance: float = 1e-5) -> Errors:
    """Fails unless the run equals the reference in the sense of `Errors`."""
    found = errors(run, reference)
    assert found.largest <= tolerance, found
    return found


def same_bits(a: Run, b: Run) -> bool:
    """Two runs are equal to the bit."""
    assert a.gradients.keys() == b.gradients.keys()
    pairs = [*zip(a.logprobs, b.logprobs, strict=True), *zip(a.entropy, b.entropy, strict=True)]
    pairs += [(a.gradients[name], b.gradients[name]) for name in a.gradients]
    return all(torch.equal(x, y) for x, y in pairs)


@contextmanager
def counted(modules: Sequence[nn.Module]) -> Iterator[Callable[[], int]]:
    """Counts the forwards of modules, those of a recomputation included, which may stop inside.
    Layers are not probed meanwhile."""
    calls: list[None] = []
    handles = [m.register_forward_pre_hook(lambda *_: calls.append(None)) for m in modules]
    try:
        with patch.object(*place("probe of layers"), lambda *_: None):
            yield lambda: len(calls)
    finally:
        for handle in handles:
            handle.remove()
