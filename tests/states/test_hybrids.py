"""Families whose layers carry a state: exact in float64, red where a state or its gradient is lost,
and `prepare`, which lets their layers know the tree."""

from __future__ import annotations

import copy
import io
import json
import pickle
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree.models import families
from prefixtree.models.along_tree import AlongTree
from prefixtree.packing.segments import segments_of
from prefixtree.planning.costs import CostModel
from prefixtree.rollouts import read_rollouts
from prefixtree.states import layers as hybrids
from prefixtree.states import protocol
from prefixtree.testing.models import Setting
from prefixtree.testing.verify import verify
from tests.support.float64 import Float64
from tests.support.full import each_once, mostly
from tests.support.hooks import put
from tests.support.hybrid_cases import (
    FEW,
    in_float64,
    logprobs_of,
    long_packed,
    long_sequences,
    needs_states,
    packed_inputs,
)
from tests.support.hybrid_configs import HYBRIDS
from tests.support.models import (
    build,
    cases,
    errors,
    mostly_full,
    ragged_objective,
    ragged_packed,
    run_packed,
    run_replicated,
)


@needs_states
@pytest.mark.parametrize("family", mostly_full(HYBRIDS, {"qwen3_5", "nemotron_h", "lfm2"}))
def test_float64_is_exact(family: str, record_property: Any) -> None:
    """A prepared model, called by itself, against each sequence alone through eager."""
    sequences, packed = long_sequences(), long_packed()
    assert segments_of(packed.mask.host).level.max() >= 3
    weights = [torch.randn(len(s) - 1, dtype=torch.float64) for s in sequences]
    with Float64():
        eager = in_float64(family, "eager")
        expected = []
        for tokens, weight in zip(sequences, weights, strict=True):
            ids = torch.from_numpy(tokens)
            logits = eager(input_ids=ids[None], use_cache=False).logits[0]
            expected.append(logprobs_of(logits[:-1], ids[1:]))
            (expected[-1] * weight).sum().backward()
        tree = pt.prepare(in_float64(family))
        inputs = packed.model_inputs()
        rows = families.family_of(tree.config).position_rows
        if rows > 1:
            inputs["position_ids"] = inputs["position_ids"].expand(rows, 1, -1)
        logits = tree(**inputs).logits[0]
        predictor = packed.predictor.long().clamp(min=0)
        of_tokens = logprobs_of(logits[predictor], packed.input_ids)
        got = [part[1:] for part in packed.unpack(of_tokens)]
        sum((g * w).sum() for g, w in zip(got, weights, strict=True)).backward()
    largest = max(float((g - e).detach().abs().max()) for g, e in zip(got, expected, strict=True))
    worst = 0.0
    for (name, p), (_, q) in zip(eager.named_parameters(), tree.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and float(p.grad.norm()) > 1e-10:
            worst = max(worst, float((p.grad - q.grad).norm() / p.grad.norm()))
    print(f"{family}: float64 log p {largest:.1e}, gradient {worst:.1e}")
    record_property("float64", f"{largest:.1e} {worst:.1e}")
    assert largest < 1e-11 and worst < 1e-10


# ---- the comparison must turn red ----------------------------------------------------------------


@cache
def _reference(family: str) -> Any:
    return run_replicated(build(family, "eager"), ragged_objective())


def _errors(model: Any, family: str) -> Any:
    return errors(run_packed(model, ragged_packed(), ragged_objective()), _reference(family))


def _by_definition(mistake: str) -> dict[str, Any]:
    """The operators token by token, with a mistake in what passes from a segment to its children,
    or none."""

    def handed(state: torch.Tensor, is_branch: bool) -> torch.Tensor:
        if not is_branch or mistake not in ("no states", "no gradient"):
            return state
        return state.detach() if mistake == "no gradient" else torch.zeros_like(state)

    def scan(mask: pt.TreeMask, zero: torch.Tensor, step: Any) -> torch.Tensor:
        predictor, states, outs = mask.host.predictor, [], []
        starts = set(segments_of(mask.host).start.tolist())
        for t in range(mask.num_tokens):
            before = zero if predictor[t] < 0 else handed(states[predictor[t]], t in starts)
            state, out = step(t, before)
            states.append(state)
            outs.append(out)
        return torch.stack(outs)

    def delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, mask: Any, *, qk_l2norm: bool) -> Any:
        assert qk_l2norm
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], 1) for x in (q, k))

        def step(t: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state = state * g[t].exp()[:, None, None]
            new = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
            state = state + k[t][..., None] * new[:, None]
            return state, torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5

        return scan(mask, v.new_zeros(v.shape[1], k.shape[2], v.shape[2]), step)

    def ssd(x: Any, dt: Any, A: Any, B: Any, C: Any, mask: Any, **options: Any) -> Any:
        dt = (dt + options["dt_bias"]).exp().log1p().clamp(*options["dt_limit"])
        B, C = (y.repeat_interleave(x.shape[1] // B.shape[1], 1) for y in (B, C))

        def step(t: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state = state * (A * dt[t]).exp()[:, None, None]
            state = state + torch.einsum("hp,hn->hpn", x[t] * dt[t][:, None], B[t])
            return state, torch.einsum("hpn,hn->hp", state, C[t])

        zero = x.new_zeros(*x.shape[1:], B.shape[2])
        return scan(mask, zero, step) + x * options["D"][:, None]

    def conv(x: Any, weight: Any, bias: Any, mask: Any, activation: Any) -> Any:
        at = np.arange(mask.num_tokens)
        out, rows = 0, torch.cat([x, x.new_zeros(1, x.shape[1])])
        for tap in range(weight.shape[1]):
            out = out + rows[at] * weight[:, weight.shape[1] - 1 - tap]
            packed_order = np.where(at > 0, at - 1, -1)
            along_tree = np.where(at >= 0, mask.host.predictor[at], -1)
            at = packed_order if mistake == "convolution in packed order" else along_tree
        out = out if bias is None else out + bias
        return torch.nn.functional.silu(out) if activation else out

    return {"tree_delta_rule": delta_rule, "tree_ssd": ssd, "tree_conv": conv}


_MISTAKES = ["none", "no states", "no gradient", "convolution in packed order"]


@pytest.mark.usefixtures("unprobed")
@needs_states
@pytest.mark.parametrize(("family", "mistake"), each_once(FEW, _MISTAKES))
def test_states_that_do_not_follow_the_tree_turn_it_red(
    family: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, "check of states", lambda *_: None)
    for name, operator in _by_definition(mistake).items():
        monkeypatch.setattr(protocol, name, operator)
    found = _errors(build(family), family)
    print(f"{family}, {mistake}: {found}")
    if mistake == "none":
        assert found.largest < 5e-5
    elif mistake == "no gradient":
        assert found.logprob < 1e-5 and found.gradient > 0.01
    else:
        assert found.logprob > 1e-3


@pytest.mark.usefixtures("unprobed")
@needs_states
@pytest.mark.parametrize("family", FEW)
def test_layers_that_are_not_prepared_turn_it_red(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it not for the checks, layers would drop the tree mask without a word."""
    monkeypatch.setattr("prefixtree.scoring.forward.prepare_layers", lambda _: None)
    with pytest.raises(pt.UnsupportedError, match=r"call prefixtree.prepare\(model\) once"):
        _errors(build(family), family)
    monkeypatch.setattr("prefixtree.models.attention.check_prepared", lambda _: None)
    with pytest.raises(pt.UnsupportedError, match="0 recurrent calls followed the tree"):
        _errors(build(family), family)
    put(monkeypatch, "check of states", lambda *_: None)
    assert _errors(build(family), family).logprob > 1e-2


# ---- prepare -------------------------------------------------------------------------------------


def _mixers(model: Any) -> list[Any]:
    return [m for m in model.modules() if hybrids.functions_of(type(m))]


@needs_states
@pytest.mark.parametrize("family", mostly_full(HYBRIDS, {"qwen3_5", "nemotron_h"}))
def test_without_a_tree_the_familys_own_code_runs(family: str) -> None:
    """To the bit, forward and backward; and no class of transformers has changed."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 97, (2, 80)))
    runs = []
    for is_prepared in (False, True):
        model = build(family)
        classes = [type(m) for m in _mixers(model)]
        forwards = [c.forward for c in classes]
        if is_prepared:
            pt.prepare(model)
            assert [c.forward for c in classes] == forwards
            assert {type(m).__mro__[2] for m in _mixers(model)} == set(classes)
        model.set_attn_implementation("eager")
        logits = model(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        runs.append([logits.detach(), *gradients])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@needs_states
@pytest.mark.parametrize("family", mostly_full(HYBRIDS, {"qwen3_5", "nemotron_h"}))
def test_prepared_generates_the_same_tokens(family: str) -> None:
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 97, (2, 12)))
    found = []
    for implementation in ("eager", "prefixtree"):
        model = build(family, implementation).eval()
        if implementation == "prefixtree":
            pt.prepare(model)
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        mask = torch.ones_like(ids)
        found.append(model.generate(ids, attention_mask=mask, **options))
    assert torch.equal(*found)


@needs_states
def test_generating_before_a_model_is_prepared() -> None:
    """Granite's attention sees no positions then; the mend is one that a trainer takes too."""
    model = build("granitemoehybrid").eval()
    message = r"prefixtree\.prepare\(model\) once before it generates"
    with pytest.raises(pt.UnsupportedError, match=message):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)


@needs_states
@pytest.mark.parametrize("family", mostly(FEW, ["nemotron_h"]))
def test_copies_of_a_prepared_model(family: str) -> None:
    """Twice, deep copies, pickles and shallow copies are prepared, and their own."""
    model = pt.prepare(pt.prepare(build(family)))
    once = [type(m) for m in _mixers(model)]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
        copy.copy(_mixers(model)[0]),
    ]
    for other in copies:
        assert {type(m) for m in _mixers(other)} <= set(once)
    for other in copies[:3]:
        # a forward that is still bound to the first model would give gradients to it
        assert _errors(other, family).largest < 5e-5
    assert all(p.grad is None for p in model.parameters())


@needs_states
@pytest.mark.parametrize("family", FEW)
def test_saved_and_loaded_models_are_to_be_prepared(family: str, tmp_path: Any) -> None:
    model = pt.prepare(build(family))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="prefixtree")
    assert not any(isinstance(m, AlongTree) for m in loaded.modules())
    loaded.load_state_dict(model.state_dict())
    with pytest.raises(pt.UnsupportedError, match=r"call prefixtree.prepare\(model\) once"):
        loaded(**packed_inputs(loaded))
    with torch.no_grad():
        assert torch.equal(
            pt.prepare(loaded)(**packed_inputs(loaded)).logits, model(**packed_inputs(model)).logits
        )


@needs_states
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(("family", "first"), each_once(FEW, ["adapter", "prepare"]))
def test_adapters_of_recurrent_layers(family: str, first: str) -> None:
    peft = pytest.importorskip("peft")
    # PEFT itself refuses out_proj of Mamba layers
    names = {"qwen3_5": ["in_proj_qkv", "in_proj_b", "out_proj", "q_proj"]}
    config = peft.LoraConfig(
        r=4, target_modules=names.get(family, ["in_proj", "q_proj"]), init_lora_weights=False
    )

    def adapted(implementation: str) -> Any:
        model = build(family, implementation)
        if first == "prepare" and implementation == "prefixtree":
            pt.prepare(model)
        torch.manual_seed(0)
        return peft.get_peft_model(model, config)

    reference = run_replicated(adapted("eager"), ragged_objective())
    run = run_packed(pt.prepare(adapted("prefixtree")), ragged_packed(), ragged_objective())
    found = errors(run, reference)
    assert any("lora" in name for name in run.gradients) and found.largest < 5e-5, found


# ---- what it relies on ---------------------------------------------------------------------------


@needs_states
@pytest.mark.parametrize("family", cases(HYBRIDS))
def test_contract_with_recurrent_layers_of_transformers(family: str) -> None:
    """The names that layers call, found in their module and called with the layer's keywords."""
    import dis

    model = build(family)
    rules = families.family_of(model.config).functions
    assert _mixers(model)
    for layer in _mixers(model):
        forward = hybrids.inspect.unwrap(type(layer).forward)
        loaded = [i.argval for i in dis.get_instructions(forward) if i.opname == "LOAD_GLOBAL"]
        assert hybrids.functions_of(type(layer)) == set(rules) <= set(loaded)
        signature = hybrids.inspect.signature(forward)
        assert any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


@needs_states
@pytest.mark.full
@pytest.mark.parametrize(("family", "part"), [(FEW[0], "model"), (FEW[0], "text")])
def test_verify_and_plan(family: str, part: str, tmp_path: Any) -> None:
    """From a config.json, as a user has it: with freshly drawn weights, a wrapper's or a text's."""
    config = build(family).config
    (config if part == "model" else config.get_text_config()).save_pretrained(tmp_path)
    file = tmp_path / "rollouts.jsonl"
    sequences = [s.tolist() for s in ragged_objective().sequences]
    file.write_text("".join(json.dumps({"input_ids": s}) + "\n" for s in sequences))
    setting = Setting(str(tmp_path / "config.json"), device="cpu")
    found = verify(read_rollouts(file), setting)
    assert found["passed"], found["checks"]
    # states cost per token: pairs are those of the one layer that attends
    cost = CostModel.from_config(config)
    assert cost.attention == 7 * 4 * (16 + 16)
    plan = pt.plan_micro_batches(sequences, max_tokens=60, cost_model=cost)
    assert sorted(i for batch in plan[0] for i in batch.sequence_indices) == list(range(12))


@needs_states
@pytest.mark.parametrize(
    "family", mostly(cases(["qwen3", "qwen3_5", "kimi_linear", "olmo_hybrid"]), ["qwen3_5"])
)
def test_gradients_reach_projections_token_by_token(family: str) -> None:
    """Channel by channel, their products take several times as long on a GPU."""
    model, channelwise = build(family), []

    def note(name: str, module: torch.nn.Module, _: Any, upstream: Any) -> None:
        if upstream[0].stride(-1) != 1:
            channelwise.append((name, upstream[0].shape, upstream[0].stride()))

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_full_backward_hook(partial(note, name))
    scores = pt.sequence_logprobs(model, ragged_packed())
    torch.cat(list(scores.logprobs)).sum().backward()
    assert not channelwise


@needs_states
@pytest.mark.parametrize("family", cases(["qwen3_5", "qwen3_next"]))
def test_key_heads_are_no_copies(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older transformers repeat them before the call: ranks would exchange copies."""
    seen = []
    rule = protocol.tree_delta_rule

    def note(query: torch.Tensor, key: torch.Tensor, *more: Any, **options: Any) -> Any:
        seen.append((query.shape[1], key.shape[1]))
        return rule(query, key, *more, **options)

    monkeypatch.setattr(protocol, "tree_delta_rule", note)
    model = build(family)
    pt.sequence_logprobs(model, ragged_packed())
    heads = model.config.get_text_config().linear_num_key_heads
    assert seen and set(seen) == {(heads, heads)}
