"""Router replay: the recorded routes run, packed as sequence by sequence.

The replicated side: `tests.support.replay`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from packaging import version
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import prefixtree as pt
from prefixtree.experts import routers
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.full import in_turn, mostly
from tests.support.hooks import put
from tests.support.models import (
    TRANSFORMERS,
    Run,
    assert_same,
    backward_of,
    build,
    cases,
    enable_checkpointing,
    errors,
    gradients,
    ragged_objective,
    ragged_sequences,
    run_packed,
    run_replicated,
    tolerance,
)
from tests.support.replay import (
    CHOSEN,
    EXPERTS,
    drawn_routes,
    recorded_choice,
    routers_of,
    run_replayed,
)

# each way to recompute, in turn
_QUICK = ["flex_olmo", "gpt_oss", "mellum", "qwen3_moe"]
FAMILIES = cases(sorted({name.removesuffix("_text") for name in routers.REPLAYED_ROUTERS}))

pytestmark = pytest.mark.skipif(
    version.parse("5.17") > TRANSFORMERS, reason="refused: see test_older_transformers"
)


@cache
def _routes(model_type: str = "qwen3_moe") -> list[np.ndarray]:
    routers = routers_of(build(model_type))
    return drawn_routes(ragged_sequences(), len(routers), routers[0].num_experts)


def _pack(routes: Sequence[np.ndarray] | None = None) -> pt.PackedForest:
    routes = _routes() if routes is None else routes
    return pt.pack(pt.PrefixForest.from_sequences(ragged_sequences(), routes=routes))


@cache
def _reference(model_type: str) -> Run:
    model = build(model_type, "eager")
    return run_replayed(model, ragged_objective(), _routes(model_type))


def test_the_tree_parts_and_still_shares():
    forest = _pack().forest
    distinct = len({tuple(s[:n]) for s in ragged_sequences() for n in range(1, len(s) + 1)})
    assert distinct < forest.num_tokens < forest.num_replicated_tokens / 2


@pytest.mark.parametrize(
    ("model_type", "mode"),
    mostly(
        in_turn(FAMILIES, ["plain", "reentrant", "non-reentrant", "all_but_attention"]),
        _QUICK,
    ),
)
def test_equals_the_replay_of_each_sequence(model_type, mode):
    model = build(model_type)
    if mode.endswith("reentrant"):
        enable_checkpointing(model, use_reentrant=mode == "reentrant")
    recompute = mode if mode == "all_but_attention" else None
    reference, packed = _reference(model_type), _pack(_routes(model_type))
    run = run_packed(model, packed, ragged_objective(), recompute=recompute)
    found = assert_same(run, reference, tolerance(model_type))
    print(f"{model_type}, {mode}: {found}")
    # what the routers choose by themselves is far off, also right after a replay
    plain = pt.pack(pt.PrefixForest.from_sequences(ragged_sequences()))
    alone = run_packed(model, plain, ragged_objective())
    assert errors(alone, reference).largest > 0.1
    assert_same(alone, _unreplayed(model_type), tolerance(model_type))


@cache
def _unreplayed(model_type: str) -> Run:
    return run_replicated(build(model_type, "eager"), ragged_objective())


@pytest.mark.parametrize("model_type", mostly(FAMILIES, _QUICK))
def test_the_routers_gradient_is_kept(model_type, monkeypatch):
    """And its absence is seen: the experts' weights must be a function of the logits."""
    text = build(model_type).config.get_text_config().model_type
    kind, weights = routers.REPLAYED_ROUTERS[text]

    def constant(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return weights(router, logits.detach(), experts)

    monkeypatch.setitem(routers.REPLAYED_ROUTERS, text, (kind, constant))
    packed = _pack(_routes(model_type))
    run = run_packed(build(model_type), packed, ragged_objective())
    reference = _reference(model_type)
    assert any("gate" in name or "router" in name for name in reference.gradients)
    nothing = {name: torch.zeros_like(g) for name, g in reference.gradients.items()}
    run.gradients.update({name: nothing[name] for name in nothing.keys() - run.gradients.keys()})
    found = errors(run, reference)
    assert found.logprob < tolerance(model_type) and found.gradient > 0.1


def test_routes_that_are_lost_in_the_backward_are_seen():
    """A recomputation in which the layers choose by themselves gives other gradients. (In
    checkpoints that are not reentrant, torch sees that it saves other tensors.)"""
    model = build("qwen3_moe")
    enable_checkpointing(model, use_reentrant=True)
    objective = ragged_objective()
    scores = sequence_logprobs(
        model,
        _pack(),
        objective.temperatures,
        objective.loss_masks,
        return_entropy=True,
    )
    for router in routers_of(model):
        router._forward_hooks.clear()
    backward_of(objective, scores)
    values = [[x.detach() for x in part] for part in (scores.logprobs, scores.entropy or [])]
    found = errors(Run(*values, gradients(model)), _reference("qwen3_moe"))
    assert found.logprob < 1e-5 and found.gradient > 0.1


@pytest.mark.parametrize("model_type", mostly(FAMILIES, ["gpt_oss", "qwen3_moe"]))
def test_the_models_own_routes_change_nothing(model_type):
    """Recorded from each sequence alone, they are what the packed run chooses anyway."""
    eager, recorded = build(model_type, "eager"), []
    kept: list[torch.Tensor] = []
    handles = [
        router.register_forward_hook(lambda _, __, output: kept.append(output[2]))
        for router in routers_of(eager)
    ]
    for sequence in ragged_sequences():
        kept.clear()
        with torch.no_grad():
            eager(input_ids=torch.from_numpy(sequence)[None], use_cache=False)
        recorded.append(torch.stack(kept, 1).numpy())
    for handle in handles:
        handle.remove()
    packed = _pack(recorded)
    plain = pt.PrefixForest.from_sequences(ragged_sequences())
    assert packed.forest.num_tokens == plain.num_tokens
    run = run_packed(build(model_type), packed, ragged_objective())
    assert_same(run, _unreplayed(model_type), tolerance(model_type))


def test_layers_without_experts():
    """Routes have an entry per router, whichever layers these are in."""
    model = build("qwen3_moe", mlp_only_layers=[1])
    routes = [route[:, [0, 2]] for route in _routes()]
    assert len(routers_of(model)) == 2
    scores = sequence_logprobs(model, _pack(routes))
    eager = build("qwen3_moe", "eager", mlp_only_layers=[1])
    for i, sequence in enumerate(ragged_sequences()):
        ids = torch.from_numpy(sequence)[None]
        with recorded_choice(eager, routes[i]), torch.no_grad():
            log_p = eager(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        wanted = log_p.gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(scores.logprobs[i], wanted, atol=1e-5, rtol=1e-5)


def test_padding_micro_batches_and_copies():
    """Micro-batches carry their routes; a copy and a pickle of a model that replayed replay."""
    model = build("qwen3_moe").eval()
    expected = sequence_logprobs(model, _pack()).logprobs
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        forest = _pack().forest
        plan = pt.plan_micro_batches(forest, max_tokens=64)
        assert len(plan[0]) > 1
        for batch in plan[0]:
            packed = pt.pack(batch.packed.forest, pad_to_multiple_of=32)
            found = sequence_logprobs(other, packed).logprobs
            for a, b in zip(found, batch.take(expected), strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        assert all(len(router._forward_hooks) == 1 for router in routers_of(other))


def test_the_load_balancing_loss_beside_a_replay():
    """Computed from the same logits, of the tokens as the routes have them: as transformers
    computes it where the choice is another's."""
    packed = _pack()
    scores = sequence_logprobs(build("qwen3_moe"), packed, output_router_logits=True)
    eager = build("qwen3_moe", "eager")
    logits: list[list[torch.Tensor]] = []
    for sequence, routes in zip(ragged_sequences(), _routes(), strict=True):
        ids = torch.from_numpy(sequence)[None]
        with recorded_choice(eager, routes), torch.no_grad():
            output = eager(input_ids=ids, use_cache=False, output_router_logits=True)
        logits.append(list(output.router_logits))
    wanted = load_balancing_loss_func(
        tuple(map(torch.cat, zip(*logits, strict=True))), EXPERTS, CHOSEN
    )
    assert scores.aux_loss is not None
    torch.testing.assert_close(scores.aux_loss.detach(), wanted)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[:, :2], "routes have 2 layers of experts, the model 3: give one entry per"),
        (lambda r: r[..., :1], "routes have 1 experts per token, the model chooses 2"),
        (lambda r: r + 1, "routes name expert 4, the model has 4, numbered from 0"),
    ],
)
def test_routes_of_another_model(change, message):
    model = build("qwen3_moe")
    model.register_forward_pre_hook(lambda *_: pytest.fail("computed"))
    with pytest.raises(ValueError, match=message):
        sequence_logprobs(model, _pack([change(route) for route in _routes()]))


@pytest.mark.parametrize("model_type", cases(["granitemoe", "deepseek_v3", "llama"]))
def test_other_families(model_type):
    with pytest.raises(pt.UnsupportedError, match=f"'{model_type}', only in .*qwen3_moe"):
        sequence_logprobs(build(model_type), _pack())


def test_a_model_that_has_not_replayed():
    """A call past sequence_logprobs would let the routers choose, until that made it ready."""
    model, packed = build("qwen3_moe").eval(), _pack()
    with pytest.raises(pt.UnsupportedError, match="routers would choose by themselves"):
        model(**packed.model_inputs())
    expected = sequence_logprobs(model, packed).logprobs
    logits = model(**packed.model_inputs()).logits[0]
    edges = packed.edges()
    scores = logits.log_softmax(-1)[edges.predictor].gather(1, packed.input_ids[edges.token, None])
    of_token = torch.zeros(packed.num_tokens).index_put((edges.token,), scores[:, 0])
    for found, wanted in zip(packed.unpack(of_token), expected, strict=True):
        torch.testing.assert_close(found[1:], wanted, atol=1e-5, rtol=1e-5)
    inputs = packed.model_inputs()
    for wrong, message in (
        (inputs["tree_routes"][:, :2], "routes have 2 layers of experts, the model 3"),
        (inputs["tree_routes"][..., :1], r"routes are \[\d+, 1\] per layer, and the router chose"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**{**inputs, "tree_routes": wrong})


def test_routers_that_do_not_choose(monkeypatch):
    model = build("qwen3_moe")
    sequence_logprobs(model, _pack())
    hooks = routers_of(model)[1]._forward_hooks
    hooks.clear()
    sequence_logprobs(model, _pack())
    assert len(hooks) == 1, "what an interrupt cut in half is completed"
    hooks.clear()
    put(monkeypatch, "replay in routers", lambda model: 3)
    with pytest.raises(pt.UnsupportedError, match=r"2 routers took the recorded routes .* has 3"):
        sequence_logprobs(model, _pack())
    monkeypatch.undo()
    patched = build("qwen3_moe")
    router = routers_of(patched)[2]
    router.forward = router.forward
    with pytest.raises(pt.UnsupportedError, match="another forward than transformers'"):
        sequence_logprobs(patched, _pack())
    twice = build("qwen3_moe")
    twice.model.layers[1].second = routers_of(build("qwen3_moe"))[0]
    with pytest.raises(pt.UnsupportedError, match="has 2 routers and 1 attentions, expected one"):
        sequence_logprobs(twice, _pack())
    spread = build("qwen3_moe")
    spread.model.layers[0].mlp.experts._is_hooked = True
    with pytest.raises(pt.UnsupportedError, match="under tensor or expert parallelism"):
        sequence_logprobs(spread, _pack())


def test_compiled_models():
    model = build("qwen3_moe")
    pt.compile_layers(model)
    with pytest.raises(pt.UnsupportedError, match="not verified in compiled models"):
        sequence_logprobs(model, _pack())
    with pytest.raises(pt.UnsupportedError, match="not verified in compiled models"):
        sequence_logprobs(torch.compile(build("qwen3_moe")), _pack())


def test_older_transformers(monkeypatch):
    put(monkeypatch, "version of transformers for routes", "5.16.2")
    with pytest.raises(pt.UnsupportedError, match=r"transformers 5\.17 or later, 5\.16\.2 is inst"):
        sequence_logprobs(build("qwen3_moe"), _pack())
