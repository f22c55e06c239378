"""Multi-token prediction on a forest beside transformers' own layers, each sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.modeling_layers import MtpModel

import prefixtree as pt
from prefixtree.errors import UnsupportedError, refuse
from prefixtree.packing.copies import GatherIndex
from prefixtree.scoring import mtp as module
from prefixtree.scoring import mtp_refusals
from prefixtree.scoring.forward import AskedWings
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.float64 import Float64
from tests.support.full import mostly
from tests.support.models import (
    Objective,
    as_lists,
    build,
    cases,
    enable_checkpointing,
    made_of,
    pack_sequences,
    ragged_objective,
    ragged_packed,
    tiny_config,
    with_random_lora,
)
from tests.support.recipes import WHOLE_PAGE, code_of
from tests.support.refusals import check_cases, pattern, rows_of
from tests.support.spawn import run_ranks

LAYERS = 2
# the last layer of a hybrid attends, as in its checkpoints
_HYBRID = {"num_hidden_layers": 2, "layer_types": ("linear_attention", "full_attention")}
_CHANGES: dict[str, dict[str, Any]] = {
    "mellum": {"mtp_layer_types": ("sliding_attention", "full_attention")},
    "qwen3_5": _HYBRID,
    "qwen3_moe": {"use_sliding_window": False},
    "qwen3_next": _HYBRID,
}
_TEXT = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}


def pair(
    model_type: str = "qwen3", implementation: str = "prefixtree", dtype: Any = torch.float32
) -> tuple[Any, Any]:
    """A tiny model and its layers of multi-token prediction, with parameters that all matter."""
    if model_type in _TEXT:
        config = {**tiny_config(_TEXT[model_type])["text_config"], **as_lists(_HYBRID)}
        model = made_of(model_type, config, implementation)
    else:
        model = build(model_type, implementation, **as_lists(_CHANGES.get(model_type, {})))
    # as a checkpoint's configuration has it, or as users of one without it set it
    config = model.config.get_text_config()
    config.num_mtp_layers = LAYERS
    for name, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(config, name, None) and not getattr(config, f"mtp_{name}", None):
            setattr(config, f"mtp_{name}", [kind] * LAYERS)
    heads = MtpModel(model, LAYERS).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in heads.layers.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(noise + ("norm" in name))
    return model.to(dtype), heads.to(dtype)


Logprobs = list[list[torch.Tensor]]


def alone(model: Any, heads: Any, objective: Objective, detach: bool = False) -> Logprobs:
    """Log p of each sequence alone: of the model, then of each of transformers' layers."""
    found: Logprobs = [[] for _ in range(LAYERS + 1)]
    for i, tokens in enumerate(objective.sequences):
        ids, of_heads = torch.from_numpy(tokens)[None], heads
        positions = torch.arange(ids.shape[1])[None]
        hidden, weight = model.base_model(ids, use_cache=False)[0], heads.shared_head.weight
        for k, of_layer in enumerate(found):
            if k:
                embedded = of_heads.embed_tokens(ids[:, k:])
                if detach:
                    embedded, weight = embedded.detach(), weight.detach()
                    hidden = hidden.detach() if k == 1 else hidden
                places = positions[:, k:], None, None, embedded
                hidden = heads.forward_layer(k - 1, hidden[:, :-1], *places)
            log_p = (hidden[0, :-1] @ weight.T / objective.temperatures[i]).log_softmax(-1)
            scored = torch.from_numpy(objective.loss_masks[i][k + 1 :])
            log_p = log_p.gather(1, ids[0, k + 1 :, None])[:, 0] * scored
            of_layer.append(torch.cat([log_p.new_zeros(k), log_p]))
    return found


def packed(
    models: tuple[Any, Any], objective: Objective, forest: Any = None, **options: Any
) -> Logprobs:
    """The same of a forest."""
    given = objective.temperatures, objective.loss_masks
    forest = ragged_packed() if forest is None else forest
    scores = sequence_logprobs(models[0], forest, *given, mtp=models[1], **options)
    assert scores.mtp is not None
    return [scores.logprobs, *scores.mtp]


def loss_of(found: Logprobs, objective: Objective) -> torch.Tensor:
    """Weights of all sizes and both signs."""
    return sum(
        (log_p * w[:, k % 2].to(log_p)).sum()
        for k, of_layer in enumerate(found)
        for log_p, w in zip(of_layer, objective.weights, strict=True)
    )


def gradients_of(models: tuple[Any, Any]) -> dict[str, torch.Tensor]:
    """Of the model and of the heads' own layers, by name."""
    return {
        name: p.grad
        for part in (models[0], nn.ModuleDict({"mtp": models[1]}))
        for name, p in part.named_parameters()
        if p.grad is not None
    }


def worst(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of two tensors of a name, by the largest number of the second."""
    assert got.keys() == expected.keys()
    return max(
        float((got[name] - x).abs().max() / x.abs().max().clamp(min=1e-6))
        for name, x in expected.items()
    )


Reference = tuple[Logprobs, dict[str, torch.Tensor]]


def run_alone(models: tuple[Any, Any], objective: Objective, detach: bool) -> Reference:
    found = alone(*models, objective, detach)
    loss_of(found, objective).backward()
    return [[log_p.detach() for log_p in of_layer] for of_layer in found], gradients_of(models)


@cache
def reference(model_type: str = "qwen3", detach: bool = False) -> Reference:
    return run_alone(pair(model_type, "eager"), ragged_objective(), detach)


def differences(
    models: tuple[Any, Any],
    expected: Reference,
    objective: Objective | None = None,
    **options: Any,
) -> tuple[float, float]:
    """The largest of log p and of gradients, between a forest and its sequences alone."""
    objective = objective or ragged_objective()
    found = packed(models, objective, **options)
    loss_of(found, objective).backward()
    apart = max(
        float((a.detach() - b).abs().max())
        for mine, theirs in zip(found, expected[0], strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )
    return apart, worst(gradients_of(models), expected[1])


@pytest.mark.parametrize(
    "model_type",
    # one with a vision encoder too, whose text is verified
    mostly(cases(sorted({*mtp_refusals.VERIFIED, "qwen3_5"})), {"qwen3", "deepseek_v3", "mellum"}),
)
def test_each_sequence_alone(model_type):
    found = differences(pair(model_type), reference(model_type), mtp_detach=False)
    print(f"{model_type}: log p {found[0]:.1e}, gradients {found[1]:.1e}")
    # states are read through norms and exponentials of sums
    assert max(found) <= (1e-4 if model_type in {"qwen3_next", "qwen3_5", *_TEXT} else 1e-5)


def test_in_float64():
    # a temperature that float32 has exactly
    objective = replace(ragged_objective(), temperatures=[0.5] * len(ragged_objective().sequences))
    with Float64():
        expected = run_alone(pair("qwen3", "eager", torch.float64), objective, False)
        models = pair(dtype=torch.float64)
        found = differences(models, expected, objective, mtp_detach=False)
    assert max(found) < 1e-12, found


def test_detached():
    """The usual way: the model gets the gradient of its own loss alone, the heads all of theirs."""
    assert max(differences(pair(), reference(detach=True))) <= 1e-5
    whole, own = reference()[1], reference(detach=True)[1]
    assert worst(own, whole) > 0.1


def test_the_code_of_the_page(monkeypatch):
    (code,) = (code for code in code_of(WHOLE_PAGE) if "MtpModel" in code)
    objective, (model, heads) = ragged_objective(), pair()
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda of: heads if of is model else None)
    given = {"temperature": objective.temperatures, "loss_mask": objective.loss_masks}
    names = {"pt": pt, "model": model, "packed": ragged_packed(), **given}
    exec(compile(code, "losses.md", "exec"), names)
    expected = [-log_p.sum() for of_layer in reference()[0][1:] for log_p in of_layer]
    torch.testing.assert_close(torch.stack(names["ahead"]), torch.stack(expected))


@pytest.mark.parametrize("wrong", ["predictor", "keys"])
def test_every_part_counts(wrong, monkeypatch):
    """Hidden states off by one, and keys of tokens that have nothing to read."""

    def shifted(packed: Any) -> GatherIndex:
        rows = (packed.mask.host.predictor - 1).clip(-1)
        return GatherIndex(rows, packed.num_tokens, packed.device)

    if wrong == "predictor":
        monkeypatch.setattr(module, "before_each", shifted)
    else:
        monkeypatch.setattr(module, "mask_ahead", lambda packed, number: packed.mask)
    found = differences(pair(), reference(), mtp_detach=False)
    assert min(found) > 0.01, found


def test_sequences_too_short_for_a_layer():
    """A layer whose tokens are all too early gives zeros, and the layers before it their scores."""
    model, heads = pair()
    scores = sequence_logprobs(model, pack_sequences([[5, 6, 7], [5, 6], [5], [8, 9]]), mtp=heads)
    first, second = scores.mtp
    assert [[bool(x) for x in log_p] for log_p in first] == [[False, True], [False], [], [False]]
    assert not any(log_p.any() for log_p in second)
    sum(log_p.sum() for log_p in first + second).backward()
    assert heads.layers[0].eh_proj.weight.grad.any()


# ---- ways of running -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["steps", "checkpointing", "recompute", "compiled"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_ways(way):
    model, heads = pair()
    options: dict[str, Any] = {"mtp_detach": False}
    if way == "steps":
        options["max_step_tokens"] = 30
    elif way == "checkpointing":
        enable_checkpointing(model, use_reentrant=False)
    elif way == "recompute":
        options["recompute"] = "all_but_attention"
    else:
        pt.compile_layers(model, backend="eager")
    found = differences((model, heads), reference(), **options)
    assert max(found) <= 1e-5, found


@pytest.mark.parametrize("steps", [None, 30])
def test_a_frozen_model(steps):
    """Only the heads' own layers train."""
    model, heads = pair()
    model.requires_grad_(False)
    log_p, gradients = reference()
    gradients = {name: x for name, x in gradients.items() if name.startswith("mtp.layers.")}
    found = differences((model, heads), (log_p, gradients), max_step_tokens=steps)
    assert max(found) <= 1e-5, found


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters():
    """LoRA on the model, whose other parameters stay, and on the heads."""

    def adapted(implementation: str) -> tuple[Any, Any]:
        model, heads = pair(implementation=implementation)
        heads = with_random_lora(heads, "down_proj", "eh_proj")
        return with_random_lora(model, "q_proj", "v_proj"), heads

    model, heads = adapted("eager")
    inside = model.get_base_model(), heads.get_base_model()
    log_p, _ = run_alone(inside, ragged_objective(), False)
    expected = gradients_of((model, heads))
    names = {name.split(".lora")[0].rsplit(".", 1)[1] for name in expected}
    assert names == {"q_proj", "v_proj", "down_proj", "eh_proj"}
    found = differences(adapted("prefixtree"), (log_p, expected), mtp_detach=False)
    assert max(found) <= 1e-5, found


def test_micro_batches():
    """Those of a plan take their masks and temperatures out of those of all sequences."""
    objective, models = ragged_objective(), pair()
    plan = pt.plan_micro_batches(objective.sequences, max_tokens=60)
    batches = [batch for rank in plan for batch in rank]
    assert len(batches) > 1
    for batch in batches:
        part = replace(objective, weights=batch.take(objective.weights))
        loss_of(packed(models, objective, batch), part).backward()
    assert worst(gradients_of(models), reference(detach=True)[1]) <= 1e-5


def test_a_batch():
    """Each score stands where its token stands."""
    objective, models = ragged_objective(), pair()
    rows = pad_sequence([torch.from_numpy(tokens) for tokens in objective.sequences], True)
    lengths = torch.tensor([len(tokens) for tokens in objective.sequences])
    held = torch.arange(rows.shape[1]) < lengths[:, None]
    found = pt.batch_logprobs(models[0], rows, held, mtp=models[1]).mtp
    wanted = sequence_logprobs(models[0], ragged_packed(), mtp=models[1]).mtp
    assert found is not None and wanted is not None
    for of_layer, expected in zip(found, wanted, strict=True):
        parts = [row[1:n] for row, n in zip(of_layer, lengths, strict=True)]
        torch.testing.assert_close(torch.cat(parts), torch.cat(expected))


@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("SGD", marks=pytest.mark.full)])
def test_trained_beside_stock(optimizer):
    """Parameters after three updates by the losses of the model and of the heads."""
    objective, ends, start = ragged_objective(), [], {}
    for implementation, run in (("eager", lambda m: alone(*m, objective, True)), ("", None)):
        models = pair(implementation=implementation or "prefixtree")
        trained = dict(nn.ModuleList(models).named_parameters())
        start = start or {name: p.detach().clone() for name, p in trained.items()}
        rate = {"AdamW": 1e-3, "SGD": 1e-4}[optimizer]
        updates = getattr(torch.optim, optimizer)(trained.values(), lr=rate)
        for _ in range(3):
            updates.zero_grad()
            found = packed(models, objective) if run is None else run(models)
            loss_of(found, objective).backward()
            updates.step()
        ends.append({name: p.detach() for name, p in trained.items()})
    moved = max(float((p - start[name]).abs().max()) for name, p in ends[0].items())
    apart = max(float((p - ends[1][name]).abs().max()) for name, p in ends[0].items())
    print(f"{optimizer}: moved {moved:.1e}, apart {apart:.1e}")
    assert moved > 1e-3 and apart < moved / 100


_OF_GROUPS: tuple[dict[str, Any], ...] = (
    {},
    {"max_step_tokens": 30},
    {"group_mode": "ulysses"},
)


def on_rank(rank: int, folder: Path, which: slice) -> list[tuple[float, float]]:
    """Differences of each rank of a group, whose gradients are averaged as users do it."""
    differs, expected = [], reference()
    for options in _OF_GROUPS[which]:
        models = pair()
        objective = ragged_objective()
        found = packed(models, objective, group=dist.group.WORLD, mtp_detach=False, **options)
        # each rank weighs its own share of the mean of both losses
        (loss_of(found, objective) * (2 * rank)).backward()
        for gradient in (gradients := gradients_of(models)).values():
            dist.all_reduce(gradient)
            gradient /= 2
        apart = max(
            float((a.detach() - b).abs().max())
            for mine, theirs in zip(found, expected[0], strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )
        differs.append((apart, worst(gradients, expected[1])))
    # one rank alone asks for them
    with pytest.raises(ValueError, match="must give mtp of equal layers"):
        sequence_logprobs(
            models[0], ragged_packed(), mtp=models[1] if rank else None, group=dist.group.WORLD
        )
    return differs


@pytest.mark.parametrize(
    "which", [slice(1), pytest.param(slice(1, None), marks=pytest.mark.full)], ids=str
)
def test_in_a_group(which, tmp_path):
    for found in run_ranks(__name__, tmp_path, arguments=[which]):
        assert max(max(pair) for pair in found) <= 1e-5, found


# ---- what is refused -----------------------------------------------------------------------------

Change = Callable[[Any, Any], Any]


def asked(change: Change = lambda model, heads: None, **fields: Any) -> Any:
    """What a call asks of a model and heads that `change` changed, and fields of it that differ."""
    model, heads = pair()
    change(model, heads)
    names = [name for name in ("mtp_detach", "images", "recompute") if name in fields]
    wings = AskedWings(**{name: fields.pop(name) for name in names})
    of_call = mtp_refusals.AskedHeads(model, model, heads, heads, ragged_packed(), wings, False)
    return of_call._replace(**fields)


def _configured(**values: Any) -> Change:
    return lambda model, heads: vars(heads.config).update(values)


def _slide(model: Any, heads: Any) -> None:
    heads.layers[1].mtp_block.self_attn.sliding_window = 5


def _patch_head(model: Any, heads: Any) -> None:
    heads.shared_head.forward = heads.shared_head.forward


def _hook(model: Any, heads: Any) -> None:
    heads.layers[0].register_forward_hook(lambda *given: None)


def _ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(nn.Linear(2, 2))


class Engine(nn.Module):
    """As if DeepSpeed had made it."""

    __module__ = "deepspeed.runtime.engine"


_ROUTED = SimpleNamespace(forest=SimpleNamespace(routes=[]))
CASES: dict[str, Callable[[], Any]] = {
    "MTP: forward_layer": lambda: asked(heads=SimpleNamespace()),
    "MTP: model type": lambda: asked(_configured(model_type="llama")),
    "MTP: layer types": lambda: asked(_configured(layer_types=["linear_attention"])),
    "MTP: sliding_window": lambda: asked(_slide),
    "MTP: attention": lambda: asked(lambda _, heads: heads.set_attn_implementation("eager")),
    "MTP: another model": lambda: asked(causal_lm=build("qwen3")),
    "MTP: lm_head": lambda: asked(_patch_head),
    "MTP: foreign code": lambda: asked(_hook),
    "MTP: sharded": lambda: asked(model=Engine()),
    "MTP: ranks": lambda: asked(model=_ddp(), mtp_detach=False),
    "MTP: wrapper": lambda: asked()._replace(mtp=_ddp()),
    "MTP: routes": lambda: asked(packed=_ROUTED),
    "MTP: images": lambda: asked(images=object()),
    "MTP: output_router_logits": lambda: asked(with_router_loss=True),
    "MTP: recompute": lambda: asked(recompute="auto"),
}
ROWS = rows_of(mtp_refusals)


@pytest.fixture
def two_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_every_row_has_a_case():
    check_cases(ROWS, CASES)


@pytest.mark.parametrize("name", ROWS)
def test_rows(name, two_ranks):
    with pytest.raises(UnsupportedError, match=pattern(ROWS[name])):
        refuse(mtp_refusals.MTP, CASES[name]())


def test_what_is_served(two_ranks):
    refuse(mtp_refusals.MTP, asked())
    refuse(mtp_refusals.MTP, asked(model=_ddp()))


@pytest.mark.parametrize("mtp", ["heads", nn.Linear(2, 2), MtpModel])
def test_what_is_no_heads(mtp):
    with pytest.raises(TypeError, match=r"mtp must be .*MtpModel.*MtpModel\.from_pretrained"):
        sequence_logprobs(build("qwen3"), ragged_packed(), mtp=mtp)


def test_refused_in_a_call():
    model, heads = pair("qwen3_moe")
    with pytest.raises(UnsupportedError, match="load-balancing loss is not verified with mtp"):
        sequence_logprobs(model, ragged_packed(), mtp=heads, output_router_logits=True)
    model, heads = pair()
    with pytest.raises(UnsupportedError, match="recompute='auto' does not plan for"):
        sequence_logprobs(model, ragged_packed(), mtp=heads, recompute="auto")
    heads.layers[0].mtp_block.self_attn.attention_dropout = 0.1
    heads.config.attention_dropout = 0.1
    with pytest.raises(UnsupportedError, match=r"attention.dropout is 0\.1"):
        sequence_logprobs(model, ragged_packed(), mtp=heads)
