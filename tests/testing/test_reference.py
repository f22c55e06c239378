"""The reference of `verify`: eager attention by rows, and sums in float32 on a CPU."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from prefixtree.testing import models, reference
from prefixtree.testing.compare import gradient_differences
from prefixtree.testing.reference import EAGER_BY_ROWS, FaithfulSums
from tests.support.cli_runs import estimate_nothing, one_thread, run_json
from tests.support.family_configs import FAMILIES, VOCABULARY
from tests.support.hooks import limit, put
from tests.support.models import build, cases, mostly_full, tolerance

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
# positions have an embedding, too, and layer norms a bias
OPT = {
    "model_type": "opt",
    "vocab_size": 300,
    "hidden_size": 32,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "dropout": 0.0,
}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    estimate_nothing(monkeypatch)
    with one_thread():
        yield


@pytest.fixture
def long_rollouts(tmp_path):
    """Sequences that share nothing and hold a few tokens many times."""
    rng = np.random.default_rng(0)
    rows = [{"token_ids": [i, *rng.integers(10, 14, 1000).tolist()]} for i in range(6)]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def verify(tmp_path, long_rollouts):
    def call(config, exit_code=0):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        options = ("--dtype", "bfloat16", "--device", "cpu")
        return run_json("verify", "--model", path, long_rollouts, *options, exit_code=exit_code)

    return call


# ---- sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [QWEN3, pytest.param(OPT, marks=pytest.mark.full)], ids=["qwen3", "opt"]
)
def test_the_verdict_does_not_hang_on_torchs_sums(monkeypatch, verify, config):
    """torch's CPU backward of an embedding sums in bfloat16, worse the more tokens a call has."""
    limit = verify(config)["checks"]["gradients"]["limit"]
    monkeypatch.setattr("prefixtree.testing.verify.FaithfulSums", nullcontext)
    loose = verify(config, exit_code=1)["checks"]["gradients"]
    # of the qwen3 its embedding, of the opt a layer norm's bias; and the limit was the stricter one
    assert not loose["passed"] and limit < loose["limit"]
    assert loose["parameter"].endswith(("embed_tokens.weight", "layer_norm.bias"))


def test_a_dropped_gradient_is_red_all_the_same(monkeypatch, verify):
    """That of the last quarter of one sequence of six."""
    from prefixtree.scoring import logprobs as adapter

    original = adapter.sequence_logprobs

    def damaged(model, packed, **options):
        scores = original(model, packed, **options)
        if packed.forest.num_sequences > 1:
            kept, dropped = scores.logprobs[3].split([750, 250])
            scores.logprobs[3] = torch.cat([kept, dropped.detach()])
        return scores

    monkeypatch.setattr(adapter, "sequence_logprobs", damaged)
    checks = verify(QWEN3, exit_code=1)["checks"]
    assert [name for name, check in checks.items() if not check["passed"]] == [
        "gradients",
        "whole gradient",
    ]


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_faithful_sums(name):
    dtype = getattr(torch, name)
    eps = torch.finfo(dtype).eps
    generator = torch.Generator().manual_seed(0)
    x, upstream = torch.randn(2, 20_000, 16, generator=generator).to(dtype)
    ids = torch.randint(0, 5, (20_000,), generator=generator)
    one, zero = torch.ones(16), torch.zeros(16)
    calls = [
        (lambda w, c: F.embedding(ids, w), (5, 16)),
        (lambda w, c: F.layer_norm(x.to(c), (16,), w, zero.to(c)), (16,)),
        (lambda w, c: F.layer_norm(x.to(c), (16,), one.to(c), w), (16,)),
    ]

    def errors():
        for call, shape in calls:
            gradients, values = [], []
            for c in (dtype, torch.float32):
                weight = torch.linspace(1, 2, 16).expand(shape).to(dtype).to(c).requires_grad_()
                value = call(weight, c)
                assert value.dtype == c
                value.backward((upstream + 0.25).to(c))
                gradients.append(weight.grad.double())
                values.append(value.detach().double())
            torch.testing.assert_close(*values, rtol=eps, atol=eps)
            yield float((gradients[0] - gradients[1]).norm() / gradients[1].norm())

    with FaithfulSums():
        assert max(errors()) < eps
    # if torch mends its sums, they can go
    assert min(errors()) > 2 * eps


def test_convolutions_are_float32_while_runs_are_compared(monkeypatch, verify):
    """TF32 is torch's default for them, on GPUs."""
    seen, cudnn = [], torch.backends.cudnn

    def stopped(*given):
        seen.append(cudnn.allow_tf32)
        raise ArithmeticError

    put(monkeypatch, "verify's run", stopped)
    with pytest.raises(AssertionError):
        verify(QWEN3)
    assert seen == [False] and cudnn.allow_tf32


# ---- eager attention -----------------------------------------------------------------------------


def logits_and_gradients(model, tokens):
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=tokens[None], use_cache=False).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights).sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# hand what they chose to eager alone
_EAGER_ALONE = ("deepseek_v4", "minimax_m3_vl_text")


@pytest.mark.parametrize("name", cases(_EAGER_ALONE))
def test_whose_choice_eager_alone_takes_is_not_by_rows(tmp_path, name):
    build(name).config.to_json_file(file := tmp_path / "config.json")
    model = models.build(models.Setting(str(file), device="cpu"), EAGER_BY_ROWS)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", mostly_full(name for name in FAMILIES if name not in _EAGER_ALONE))
def test_eager_by_rows_is_eager(monkeypatch, name):
    """Windows, softcaps, sinks: in blocks of four rows, the same logits and gradients."""
    calls = []
    limit(monkeypatch, "scores of eager by rows", 4 * 4 * 30)
    monkeypatch.setattr(
        reference, "checkpoint", lambda *a, **k: calls.append(0) or checkpoint(*a, **k)
    )
    checkpoint = torch.utils.checkpoint.checkpoint
    tokens = torch.randint(3, VOCABULARY, (30,), generator=torch.Generator().manual_seed(0))
    expected, gradients = logits_and_gradients(build(name, "eager"), tokens)
    found, others = logits_and_gradients(build(name, EAGER_BY_ROWS), tokens)
    # blocks in every layer, not only in some
    assert len(calls) >= 8
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert others.keys() == gradients.keys()
    # scales of hyper-connections get 1e-4 of the whole gradient
    most = 5e-5 if name == "hy_v4" else tolerance(name)
    assert max(gradient_differences(others, gradients).values()) < most


@pytest.mark.parametrize("reentrant", [False, True])
def test_eager_by_rows_inside_gradient_checkpointing(monkeypatch, reentrant):
    limit(monkeypatch, "scores of eager by rows", 4 * 4 * 30)
    tokens = torch.randint(3, VOCABULARY, (30,), generator=torch.Generator().manual_seed(0))
    model = build("llama", EAGER_BY_ROWS)
    expected, gradients = logits_and_gradients(model, tokens)
    # renamed in transformers 5.23
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    found, others = logits_and_gradients(model, tokens)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(others, gradients)
