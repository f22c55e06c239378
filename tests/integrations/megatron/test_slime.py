"""`use_slime` and `use_miles` on modules with the names, the imports and the signatures of those
trainers, which no index has; what they compute is written here.

Read in THUDM/slime 624b824, slime/backends/megatron_utils/ (model_provider.py, model.py, loss.py,
actor.py, server/logprob_utils.py), and radixark/miles 31f1ca9, miles/backends/megatron_utils/
(model_provider.py, model.py, actor.py) and training_utils/ (loss.py, loss_hub/losses.py,
loss_hub/logit_processors.py).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from prefixtree.errors import UnsupportedError
from prefixtree.integrations import slime as adapter
from prefixtree.integrations.slime import use_miles, use_slime
from tests.integrations.megatron.runs import (
    TEMPERATURE,
    VOCABULARY,
    Case,
    Result,
    Weights,
    build,
    errors,
    gradients,
    layer_spec,
    make_config,
    make_sequences,
    run_replicated,
    thd,
    wrapped,
)
from tests.support.refusals import check_cases, pattern, rows_of

ROOM = "slime.backends.megatron_utils"
_SCORES = """
    found, end = {"log_probs": [], "entropy": []}, 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths):
        end += total
        log_p = (logits[0, end - response - 1 : end - 1] / args.rollout_temperature).log_softmax(-1)
        found["log_probs"].append(log_p.gather(1, tokens[-response:, None])[:, 0])
        found["entropy"].append(-(log_p.exp() * log_p).sum(-1))
    found = found if with_entropy else {"log_probs": found["log_probs"]}
"""
SOURCES = {
    "model_provider": """
from megatron.core.models.gpt import GPTModel

def get_model_provider_func(args, role="actor"):
    def provide(pre_process=True, post_process=True, vp_stage=None):
        kwargs = {"config": args.config, "transformer_layer_spec": args.spec, **args.sizes}
        model = GPTModel(**kwargs)
        model.role = role
        return model

    return provide
""",
    "loss": """
import torch

def get_log_probs_and_entropy(
    logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False,
    non_loss_data=True, top_p_token_ids=None, top_p_token_offsets=None,
):
"""
    + _SCORES
    + """
    return torch.empty(0), found
""",
    "model": "from .model_provider import get_model_provider_func",
    "actor": "from .loss import get_log_probs_and_entropy\nfrom . import model",
    "server.logprob_utils": f"from {ROOM}.loss import get_log_probs_and_entropy",
}


MILES, LOSSES = "miles.backends.megatron_utils", "miles.backends.training_utils"
OF_MILES = {
    f"{MILES}.model_provider": """
from megatron.core.models.gpt import GPTModel

def _apply_bridge_runtime_config(provider, args):
    provider.configured = True

def get_model_provider_func(args, role="actor"):
    provider = args.bridge
    if provider is not None:
        _apply_bridge_runtime_config(provider, args)

    def provide(pre_process=True, post_process=True, vp_stage=None, config=None):
        if provider is None:
            kwargs = {"config": args.config, "transformer_layer_spec": args.spec, **args.sizes}
            return GPTModel(**kwargs)
        model = provider.provide(pre_process=pre_process, post_process=post_process)
        forward = model.forward
        model.forward = lambda *given, **more: forward(*given, **more)
        return model

    return provide
""",
    f"{LOSSES}.loss_hub.logit_processors": """
def get_log_probs_and_entropy(
    logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False,
    entropy_requires_grad=True, non_loss_data=True, max_seq_lens=None,
):
"""
    + _SCORES
    + """
    return found
""",
    f"{LOSSES}.loss_hub.losses": f"from {LOSSES}.loss_hub.logit_processors import "
    "get_log_probs_and_entropy",
    f"{LOSSES}.loss": f"from {LOSSES}.loss_hub.logit_processors import get_log_probs_and_entropy\n"
    f"from {LOSSES}.loss_hub import losses",
    f"{MILES}.model": "from .model_provider import get_model_provider_func",
    f"{MILES}.actor": f"from {LOSSES}.loss import get_log_probs_and_entropy, losses\n"
    "from . import model",
}


def write(folder: Path, sources: dict[str, str]) -> None:
    for name, source in sources.items():
        file = folder / name.replace(".", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".py").write_text(source)


@pytest.fixture
def slime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The actor's module, as imported when slime calls its init function."""
    write(tmp_path, {f"{ROOM}.{name}": source for name, source in SOURCES.items()})
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(f"{ROOM}.actor")
    forget("slime")


@pytest.fixture
def miles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The actor's module of miles."""
    write(tmp_path, OF_MILES)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(f"{MILES}.actor")
    forget("miles")


def forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def arguments(**changes: Any) -> SimpleNamespace:
    case = Case()
    config = make_config(case)
    sizes = {"vocab_size": VOCABULARY, "max_sequence_length": 256}
    sizes |= {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    given = {
        **{"config": config, "spec": layer_spec(config), "sizes": sizes},
        **{"rollout_temperature": TEMPERATURE, "rollout_top_p": 1.0, "loss_type": "policy_loss"},
    }
    return SimpleNamespace(**{**given, **changes})


def make_model(slime: Any, args: Any, role: str = "actor") -> Any:
    """As slime goes about it."""
    use_slime(args)
    use_slime(args)
    model = slime.model.get_model_provider_func(args, role)(pre_process=True, post_process=True)
    model = model.to(torch.float64).train()
    model.load_state_dict(build(Case(), lambda spec: spec).state_dict())
    return model


def scored(slime: Any, args: Any, output: Any, sequences: list[list[int]], **more: Any) -> Any:
    _, found = slime.get_log_probs_and_entropy(
        output,
        args=args,
        unconcat_tokens=[torch.tensor(s) for s in sequences],
        total_lengths=[len(s) for s in sequences],
        response_lengths=[len(s) - 1 for s in sequences],
        non_loss_data=True,
        **more,
    )
    return found


def test_a_step_equals_sequences(slime: Any) -> None:
    """Of an actor: log-probabilities, entropies and gradients, each distinct token once."""
    args, sequences = arguments(), make_sequences()
    # slime scores a response of every sequence
    sequences = [s for s in sequences if len(s) > 1]
    weights = Weights.of(sequences)
    expected = run_replicated(build(Case(), lambda spec: spec), sequences, weights)
    ddp = wrapped(make_model(slime, args))
    seen: list[int] = []
    ddp.module.embedding.register_forward_hook(lambda m, given, out: seen.append(len(out)))
    inputs = thd(sequences)
    # slime's, aligned with predictors
    output = ddp(**inputs, labels=None, loss_mask=torch.ones_like(inputs["input_ids"]))
    assert output.shape[-1] == 2
    distinct = len({tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)})
    # and slime's padding, a sequence of its own
    assert distinct <= seen[0] < distinct + 8
    found = scored(slime, args, output, sequences, with_entropy=True)
    assert scored(slime, args, output, sequences).keys() == {"log_probs"}
    weights.loss(found["log_probs"], found["entropy"]).backward()
    result = Result(found["log_probs"], found["entropy"], gradients(ddp))
    assert errors(result, expected).worst < 1e-13
    # a response is the end of its sequence
    short = {"total_lengths": [len(s) for s in sequences], "response_lengths": [1] * len(sequences)}
    _, ends = slime.get_log_probs_and_entropy(output, args=args, unconcat_tokens=[], **short)
    assert torch.equal(torch.cat(ends["log_probs"]), torch.stack([p[-1] for p in result.logprobs]))


@pytest.mark.parametrize(
    "changes", [{"loss_type": "custom_loss"}, {"rollout_top_p": 0.9}, "critic", "server"], ids=str
)
def test_logits_where_something_else_reads_them(slime: Any, changes: Any) -> None:
    args = arguments(**(changes if isinstance(changes, dict) else {}))
    if changes == "server":
        importlib.import_module(f"{ROOM}.server.logprob_utils")
    model = make_model(slime, args, "critic" if changes == "critic" else "actor")
    assert model.role == ("critic" if changes == "critic" else "actor")
    sequences = [s for s in make_sequences() if len(s) > 1]
    seen: list[int] = []
    model.embedding.register_forward_hook(lambda m, given, out: seen.append(len(out)))
    output = model(**thd(sequences))
    assert output.shape[-1] == VOCABULARY and seen[0] < 0.6 * output.shape[1]
    weights = Weights.of(sequences)
    expected = run_replicated(build(Case(), lambda spec: spec), sequences, weights)
    found = scored(slime, args, output, sequences, with_entropy=True)
    for got, want in zip(found["log_probs"], expected.logprobs, strict=True):
        torch.testing.assert_close(got, want, atol=1e-13, rtol=0)


@pytest.mark.parametrize("by", ["arguments", "bridge"])
def test_a_step_of_miles(miles: Any, by: str) -> None:
    """Of a model of arguments, scored, and of Megatron-Bridge's, whose logits stay."""
    args = arguments(bridge=None, rollout_top_p=0.9, megatron_to_hf_mode="raw")
    if by == "bridge":
        args.megatron_to_hf_mode = "bridge"
        args.bridge = SimpleNamespace(transformer_layer_spec=args.spec)
        args.bridge.provide = lambda pre_process, post_process: GPTModel(
            config=args.config,
            transformer_layer_spec=args.bridge.transformer_layer_spec,
            **args.sizes,
        )
    sequences = [s for s in make_sequences() if len(s) > 1]
    weights = Weights.of(sequences)
    expected = run_replicated(build(Case(), lambda spec: spec), sequences, weights)
    use_miles(args)
    model = miles.model.get_model_provider_func(args)().to(torch.float64).train()
    model.load_state_dict(build(Case(), lambda spec: spec).state_dict())
    assert by == "arguments" or args.bridge.configured
    ddp = wrapped(model)
    seen: list[int] = []
    ddp.module.embedding.register_forward_hook(lambda m, given, out: seen.append(len(out)))
    output = ddp(**thd(sequences), labels=None)
    assert seen[0] < 0.6 * output.shape[1]
    assert output.shape[-1] == {"arguments": 2, "bridge": VOCABULARY}[by]
    lengths = {
        "args": args,
        "unconcat_tokens": [torch.tensor(s) for s in sequences],
        "total_lengths": [len(s) for s in sequences],
        "response_lengths": [len(s) - 1 for s in sequences],
        "max_seq_lens": None,
    }
    found = miles.losses.get_log_probs_and_entropy(output, with_entropy=True, **lengths)
    assert miles.get_log_probs_and_entropy(output, **lengths).keys() == {"log_probs"}
    weights.loss(found["log_probs"], found["entropy"]).backward()
    result = Result(found["log_probs"], found["entropy"], gradients(ddp))
    assert errors(result, expected).worst < 1e-13


CASES = {
    "REFUSALS: use_routing_replay": {"use_rollout_routing_replay": True},
    "REFUSALS: true_on_policy_mode": {"true_on_policy_mode": True},
    "REFUSALS: qkv_format": {"qkv_format": "bshd"},
    "REFUSALS: lora_rank, multi_lora": {"lora_rank": 8},
    "REFUSALS: enable_witness": {"enable_witness": True},
}


def test_refused_arguments() -> None:
    rows = rows_of(adapter)
    check_cases(rows, CASES)
    for name, given in CASES.items():
        for use in (use_slime, use_miles):
            with pytest.raises(UnsupportedError, match=pattern(rows[name])):
                use(arguments(**given))
