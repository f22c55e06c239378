"""The probe of layers: code that looks along the row is refused, and what is not known is named."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import prefixtree as pt
from prefixtree.integrations.transformers import allow_model_type
from prefixtree.models import rows_alone
from prefixtree.models.family_table import FAMILIES as TABLE
from prefixtree.sampling.sampler import TreeSampler
from tests.support.family_configs import FAMILIES, HIDDEN
from tests.support.full import each_once, in_turn, mostly
from tests.support.models import build, mostly_full, ragged_packed, reward_model

_UNKNOWN = "holds code that prefixtree does not know: "

pytestmark = pytest.mark.usefixtures("probed")


def _hooked(change: Callable[[torch.Tensor], torch.Tensor], at: str = "model.layers.1") -> Any:
    """Puts a hook on a module that changes its output."""

    def put(model: Any) -> None:
        model.get_submodule(at).register_forward_hook(lambda _, args, out: change(out))

    return put


def _mlp(kind: Callable[[nn.Module], nn.Module]) -> Any:
    """Puts another MLP around that of a layer."""

    def put(model: Any) -> None:
        layer = model.model.layers[1]
        layer.mlp = kind(layer.mlp)

    return put


class _Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class _Convolution(_Around):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, groups=HIDDEN, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return self.inner(x + 0.1 * mixed)


class _Capacity(_Around):
    """Of each of four experts the first 17 tokens of a row; the others go around it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = nn.functional.one_hot(x[..., :4].argmax(-1), 4)
        fits = (chosen * chosen.cumsum(1)).sum(-1, keepdim=True) <= 17
        return self.inner(x) * fits


class _Rounded(_Around):
    dims: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(self.dims, keepdim=True) / 127
        return self.inner((x / scale).round() * scale)


class _RoundedByRow(_Rounded):
    dims = -1


class _Norm(_Around):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.norm(x[0])[None])


def _from(start: int, stop: int | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[:, start:stop] += 0.5
        return out

    return change


def _by_place(out: torch.Tensor) -> torch.Tensor:
    return out + 0.05 * torch.arange(out.shape[1], dtype=out.dtype)[:, None].sin()


def _on_the_head(model: Any) -> None:
    def change(module: nn.Module, args: Any) -> Any:
        return (_from(10)(args[0]),)

    model.lm_head.register_forward_pre_hook(change)


def _on_the_model(model: Any) -> None:
    def change(module: nn.Module, args: Any, out: Any) -> Any:
        out.last_hidden_state = _from(10)(out.last_hidden_state)
        return out

    model.model.register_forward_hook(change)


# what it does, and where it is seen
_WRONG = {
    "tokens behind a prompt": (_hooked(_from(10)), "model.layers.1 "),
    "the first token": (_hooked(_from(0, 1)), "model.layers.1 "),
    "the last token": (_hooked(_from(-1)), "model.layers.1 "),
    "places of embeddings": (_hooked(_by_place, "model.embed_tokens"), "model.embed_tokens "),
    "the token before": (_hooked(lambda x: x + 0.1 * x.roll(1, 1)), "model.layers.1 "),
    "the mean": (_hooked(lambda x: x - x.mean(1, keepdim=True)), "model.layers.1 "),
    "the hidden states": (_on_the_model, "model "),
    "the head's input": (_on_the_head, "the input of the output embedding "),
    "a convolution": (_mlp(_Convolution), "model.layers.1.mlp "),
    "a capacity": (_mlp(_Capacity), "model.layers.1.mlp "),
    "one scale": (_mlp(_Rounded), "model.layers.1.mlp "),
    "batch statistics": (_mlp(_Norm), "model.layers.1.mlp "),
}


@pytest.mark.parametrize(("what", "dtype"), each_once(_WRONG, [torch.float32, torch.bfloat16]))
def test_what_looks_along_the_row(what, dtype):
    put, where = _WRONG[what]
    model = build("qwen3")
    put(model)
    model.to(dtype)
    with pytest.raises(pt.UnsupportedError, match=f"{where}.* gives a token another output"):
        pt.sequence_logprobs(model, ragged_packed())


@pytest.mark.parametrize("name", ["Qwen3MLP", "Qwen3DecoderLayer", "Qwen3RMSNorm"])
def test_a_patched_class(name, monkeypatch):
    from transformers.models.qwen3 import modeling_qwen3

    kind = getattr(modeling_qwen3, name)
    forward = kind.forward

    def with_token_before(self: Any, hidden_states: torch.Tensor, *args: Any, **kw: Any) -> Any:
        out = forward(self, hidden_states, *args, **kw)
        return out + 0.1 * out.roll(1, 1)

    model = build("qwen3")
    pt.sequence_logprobs(model, ragged_packed())
    monkeypatch.setattr(kind, "forward", with_token_before)
    with pytest.raises(pt.UnsupportedError, match=rf"holds the forward of class {name}"):
        pt.sequence_logprobs(model, ragged_packed())


def _look(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda *_: None)


def _by_depth(model: Any) -> None:
    def change(module: nn.Module, args: Any, kwargs: Any) -> Any:
        more = kwargs["position_ids"][..., None] > 2
        return (args[0] + 0.1 * more.to(args[0].dtype), *args[1:]), kwargs

    model.model.layers[1].register_forward_pre_hook(change, with_kwargs=True)


def _patched(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: 2 * forward(x)


_RIGHT = {
    "a hook that reads": (_look, "a hook on model.layers.0 "),
    "all tokens alike": (_hooked(lambda x: x + 0.5), "a hook on model.layers.1 "),
    "a token's depth": (_by_depth, "a hook on model.layers.1 "),
    "a scale per token": (_mlp(_RoundedByRow), "the forward of class _RoundedByRow, model.la"),
    "another forward": (_patched, "the forward of model.layers.0.mlp "),
}


@pytest.mark.parametrize(("what", "dtype"), each_once(_RIGHT, [torch.float32, torch.bfloat16]))
def test_what_treats_tokens_alone_is_named_once(what, dtype):
    put, words = _RIGHT[what]
    model = build("qwen3")
    put(model)
    model.to(dtype)
    with pytest.warns(UserWarning, match=_UNKNOWN + words):
        pt.sequence_logprobs(model, ragged_packed())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pt.sequence_logprobs(model, ragged_packed())
        pt.sequence_logprobs(model.eval(), ragged_packed())


def test_batch_norm_in_eval_mode():
    model = build("qwen3").eval()
    _mlp(_Norm)(model)
    model.eval()
    pt.sequence_logprobs(model, ragged_packed())
    norm = model.model.layers[1].mlp.norm
    with pytest.raises(pt.UnsupportedError, match=r"layers\.1\.mlp \(_Norm\)"):
        pt.sequence_logprobs(model.train(), ragged_packed())
    assert norm.num_batches_tracked == 0 and not norm.running_mean.any()


def test_a_type_that_was_allowed_warns(monkeypatch):
    monkeypatch.setitem(TABLE, "qwen3", TABLE["qwen3"])
    allow_model_type("qwen3")
    model = build("qwen3")
    _hooked(_from(10))(model)
    with pytest.warns(UserWarning, match="gives a token another output"):
        pt.sequence_logprobs(model, ragged_packed())


@pytest.mark.parametrize(
    ("family", "dtype"),
    in_turn(mostly_full(FAMILIES), [torch.float32, torch.bfloat16, torch.float16]),
)
def test_families_give_the_same_bits(family, dtype):
    """On a CPU: so rounding is far from what is refused."""
    model = pt.prepare(build(family)).to(dtype)
    rows = rows_alone._Rows.of(model.config)
    assert len(rows.in_first) == 48 and (rows.in_first != rows.in_second).sum() > 40
    assert rows_alone.foreign_code(model) == []
    with torch.no_grad():
        runs = [
            rows_alone._outputs(model, model, tokens, torch.device("cpu")) for tokens in rows[:3]
        ]
    assert len(runs[0]) > model.config.get_text_config().num_hidden_layers
    for (_, _, a), (_, _, b), (_, _, few) in zip(*runs, strict=True):
        assert torch.equal(a[rows.in_first], b[rows.in_second])
        assert torch.equal(few, a[rows.which])


# ---- how the probe runs --------------------------------------------------------------------------


def _kept(model: Any) -> None:
    plan = pt.plan_micro_batches([[3, 4, 5], [3, 4, 6]], 8, trunks=True)
    with pt.kept_trunks(model, plan[0]) as scored:
        for _, scores in scored:
            torch.cat(scores.logprobs).sum().backward()


def _kept_values(model: Any) -> None:
    plan = pt.plan_micro_batches([[3, 4, 5], [3, 4, 6]], 8, trunks=True)
    with torch.no_grad(), pt.kept_values(model, plan[0]) as scored:
        list(scored)


_WAYS = {
    "one forward": lambda m: pt.sequence_logprobs(m, ragged_packed()),
    "steps": lambda m: pt.sequence_logprobs(m, ragged_packed(), max_step_tokens=12),
    "kept trunks": _kept,
    "a teacher": lambda m: pt.Teacher(m.eval(), ragged_packed()),
    "a sampler": lambda m: TreeSampler(m.eval(), 64).start(
        pt.PrefixForest.from_sequences([[3, 4, 5]])
    ),
    "values": lambda m: pt.sequence_values(m, ragged_packed()),
    "kept values": _kept_values,
}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_:FutureWarning")
@pytest.mark.parametrize("way", mostly(_WAYS, ["one forward", "kept trunks", "a sampler"]))
def test_each_way_of_running_probes_once(way, monkeypatch):
    rows = []
    original = rows_alone._outputs
    monkeypatch.setattr(
        rows_alone, "_outputs", lambda *args: [rows.append(args[2]), original(*args)][1]
    )
    model = reward_model("qwen3") if "values" in way else build("qwen3")
    model.gradient_checkpointing_enable()
    for _ in range(3):
        _WAYS[way](model)
        # as trainers do around a forward without gradients: the hook on the embedding is another
        model.gradient_checkpointing_disable()
        model.gradient_checkpointing_enable()
    assert len(rows) == 3
    _hooked(_from(10))(model)
    with pytest.raises(pt.UnsupportedError, match=r"layers\.1 \(Qwen3DecoderLayer\)"):
        _WAYS[way](model)


class _Counts(_Around):
    """Counts its calls, in a number and in a buffer, and draws."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.calls = 0
        self.register_buffer("tokens", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.tokens += x.shape[1]
        return self.inner(x) + 0.0 * torch.rand(1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_is_left_behind(checkpointing):
    model = build("qwen3")
    _mlp(_Counts)(model)
    for layer in model.model.layers if checkpointing else ():
        layer.gradient_checkpointing = True
    state = torch.get_rng_state()
    with torch.inference_mode():
        rows_alone.check_layers(model, model, torch.device("cpu"))
    mlp = model.model.layers[1].mlp
    assert mlp.calls == 0 and not mlp.tokens.any()
    assert torch.equal(state, torch.get_rng_state())
    layers = [model, model.lm_head, *model.model.layers]
    assert not any(m._forward_hooks or "forward" in vars(m) for m in layers)
    assert all(m.gradient_checkpointing is checkpointing for m in model.model.layers)


def test_gradients_under_autocast():
    """Casts that autocast keeps of a forward without gradients have none."""
    gradients = []
    for probed in (True, False):
        model = build("qwen3")
        if not probed:
            with torch.no_grad():
                pt.sequence_logprobs(model, ragged_packed())
        with torch.autocast("cpu", torch.bfloat16):
            scores = pt.sequence_logprobs(model, ragged_packed())
        torch.cat(scores.logprobs).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(g is not None for g in gradients[0])
    assert all(map(torch.equal, *gradients))


def test_a_model_that_does_not_run_speaks_itself():
    model = build("qwen3")

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("no token")

    model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        pt.sequence_logprobs(model, ragged_packed())


def test_nothing_is_compiled_for_the_probe():
    model = pt.prepare(build("qwen3"))
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    for layer in model.model.layers:
        layer.compile(backend=backend)
    rows_alone.check_layers(model, model, torch.device("cpu"))
    assert compiled == []
    torch._dynamo.reset()


def test_a_sharded_model_is_probed_alike_on_all_ranks(monkeypatch):
    """What one rank alone changed later is named there, and makes it run no forward."""
    monkeypatch.setattr(rows_alone, "is_sharded", lambda model: True)
    probed = []
    monkeypatch.setattr(rows_alone, "_difference", lambda *_: probed.append(1))
    model = build("qwen3")
    for change in (contextlib.suppress, lambda: _look(model), model.eval, model.train):
        change()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            rows_alone.check_layers(model, model, torch.device("cpu"))
        assert len(said) == (change not in (contextlib.suppress, model.eval, model.train))
    assert len(probed) == 2


def test_tokens_of_the_probe():
    """Text: neither padding nor images."""
    config = build("qwen3_vl").config
    rows = rows_alone._Rows.of(config)
    special = [config.image_token_id, config.video_token_id]
    assert not np.isin(special, [*rows.first, *rows.second]).any()
