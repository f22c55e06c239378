"""The forwards of OpenRLHF, SkyRL and ms-swift, packed, beside the trainers' own on those rows."""

from __future__ import annotations

import copy
import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import prefixtree as pt
from prefixtree.integrations.batch_trainers import _OURS, use_ms_swift, use_openrlhf, use_skyrl
from tests.support import forks
from tests.support.models import build, gradients, ragged_sequences

ACTOR = "openrlhf.models.actor"
WRAPPER = "skyrl.backends.skyrl_train.workers.model_wrapper"
SWIFT = "swift.rlhf_trainers.grpo_trainer"
ACTIONS = 6


def _rows(left: bool = True) -> dict[str, torch.Tensor]:
    """Rows padded on the left, as both trainers pad prompts; the last ACTIONS columns are drawn."""
    sequences = [s for s in ragged_sequences() if len(s) > ACTIONS]
    columns = max(map(len, sequences)) + 2
    ids = torch.zeros(len(sequences), columns, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(sequences):
        # some end before the last column, as responses do
        end = columns - row % 3
        ids[row, end - len(tokens) : end] = torch.from_numpy(tokens)
        mask[row, end - len(tokens) : end] = 1
    return {"sequences": ids, "attention_mask": mask, "action_mask": mask[:, -ACTIONS:]}


def _weights(rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of each action, 0 where none is."""
    draw = torch.Generator().manual_seed(2)
    mask = rows["action_mask"]
    return torch.randn(*mask.shape, 2, generator=draw) * mask[..., None]


def _compare(theirs: Any, ours: Any, weights: torch.Tensor, bound: float = 5e-6) -> None:
    """Log-probabilities and entropies of the actions, and all gradients."""
    found = []
    for model, (logprobs, entropy) in (theirs, ours):
        model.zero_grad(set_to_none=True)
        ((logprobs * weights[..., 0]).sum() + (entropy * weights[..., 1]).sum()).backward()
        found.append((logprobs.detach(), entropy.detach(), gradients(model)))
    (want_p, want_e, want), (got_p, got_e, got) = found
    is_action = weights[..., 0] != 0
    assert is_action.sum() > 30
    torch.testing.assert_close(got_p[is_action], want_p[is_action], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got_e[is_action], want_e[is_action], atol=1e-5, rtol=1e-5)
    assert got.keys() == want.keys()
    total = float(torch.stack([g.norm() for g in want.values()]).norm())
    worst = max(
        float((got[n] - g).norm()) / max(float(g.norm()), 1e-3 * total) for n, g in want.items()
    )
    print(f"worst gradient {worst:.1e}")
    assert worst < bound


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "qwen3_5"])
def test_openrlhf(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = importlib.import_module(ACTOR).Actor
    monkeypatch.setattr(actor, "forward", actor.forward)
    monkeypatch.setattr(actor, "__init__", actor.__init__)
    rows = _rows()
    model = build(model_type, "eager")
    asked: dict[str, Any] = {"return_output": True, "return_entropy": True}
    theirs = actor(copy.deepcopy(model), temperature=0.7)
    theirs.packing_samples = False  # only a path sets it
    logprobs, output = theirs(**rows, **asked)
    wanted = theirs.model, (logprobs, output.entropy[:, -ACTIONS:])
    alone = theirs(rows["sequences"], attention_mask=rows["attention_mask"], return_logprobs=True)
    use_openrlhf()
    use_openrlhf()
    ours = actor(copy.deepcopy(model), temperature=0.7)
    ours.packing_samples = False
    logprobs, output = ours(**rows, **asked)
    found = ours.model, (logprobs, output.entropy[:, -ACTIONS:])
    _compare(wanted, found, _weights(rows), 1e-4 if model_type == "qwen3_5" else 5e-6)
    # all tokens, without an action mask; those of a row that have a predictor
    everything = ours(
        rows["sequences"], attention_mask=rows["attention_mask"], return_logprobs=True
    )
    both = (rows["attention_mask"][:, 1:] * rows["attention_mask"][:, :-1]).bool()
    torch.testing.assert_close(everything[both], alone[both], atol=2e-5, rtol=1e-5)
    # logits go the trainer's way, where the model refuses to train without its mask
    with pytest.raises(ValueError, match="runs packed forests alone, and these take no"):
        ours(**{**rows, "action_mask": None}, return_output=True)
    with pytest.raises(pt.UnsupportedError, match="pixel_values: images"):
        ours(**rows, pixel_values=torch.zeros(1))
    with pytest.raises(pt.UnsupportedError, match="ring attention"):
        ours(**rows, ring_attn_group=object())


def test_draws_count_once_in_openrlhf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own clipped loss, of two micro-batches, with weights within the advantages."""
    actor = importlib.import_module(ACTOR).Actor
    monkeypatch.setattr(actor, "forward", actor.forward)
    monkeypatch.setattr(actor, "__init__", actor.__init__)
    use_openrlhf()
    policy = actor(build("qwen3"), temperature=1.0)
    policy.packing_samples = False
    length = max(map(len, forks.SEQUENCES))
    ids, real, mask = torch.zeros(3, 5, length, dtype=torch.long)
    advantages = torch.zeros(5, length)
    # how far the policy has moved, so that some tokens are clipped
    moved = torch.linspace(-0.5, 0.5, length).repeat(5, 1)
    for i, tokens in enumerate(forks.SEQUENCES):
        ids[i, -len(tokens) :], real[i, -len(tokens) :] = torch.tensor(tokens), 1
        mask[i, -len(tokens) :] = torch.tensor(forks.MASKS[i])
        advantages[i, 1 - len(tokens) :] = forks.ADVANTAGES[i]
    plan = pt.plan_micro_batches(forks.SEQUENCES, 99)
    weights = torch.zeros(real.shape)
    weights[real.bool()] = torch.cat(
        plan.token_weights("rollout-mean", forks.MASKS, rollouts=forks.ROLLOUTS)
    ).float()
    loss = importlib.import_module("openrlhf.models.loss").PolicyLoss(dual_clip=3.0)
    given = (weights * advantages * mask.sum())[:, 1:]
    for rows in (slice(0, 3), slice(3, 5)):
        logprobs = policy(ids[rows], mask[rows, 1:], real[rows], return_output=False)
        old = logprobs.detach() - moved[rows, 1:]
        total = {"batch_num_tokens": mask.sum()}
        loss(logprobs, old, given[rows], mask[rows, 1:], **total)[0].backward()
    reference = build("qwen3", "eager")
    clipped = 0
    for i, tokens in enumerate(forks.SEQUENCES):
        row = torch.tensor(tokens)
        log_p = reference(row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        new = log_p.gather(1, row[1:, None])[:, 0]
        ratio = (new - new.detach() + moved[i, 1 - len(tokens) :]).exp()
        a = forks.ADVANTAGES[i]
        least = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        least = torch.where(a < 0, least.maximum(3.0 * a), least)
        clipped += int((least != ratio * a).sum())
        (-weights[i, 1 - len(tokens) :] * least).sum().backward()
    assert clipped > 3
    for name, expected in gradients(reference).items():
        found = gradients(policy.model)[name]
        assert float((found - expected).norm() / expected.norm()) < 5e-6, name


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "qwen3_5"])
def test_skyrl(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = importlib.import_module(WRAPPER).HFModelWrapper
    monkeypatch.setattr(wrapper, "forward", wrapper.forward)
    monkeypatch.setattr(wrapper, "__init__", wrapper.__init__)
    rows = _rows()
    given = {name: rows[name] for name in ("sequences", "attention_mask")}
    asked: dict[str, Any] = {
        "num_actions": [ACTIONS] * len(rows["sequences"]),
        "temperature": 0.7,
        "return_output": True,
        "compute_entropy": True,
    }
    model = build(model_type, "eager")
    theirs = wrapper(copy.deepcopy(model))
    logprobs, output = theirs(**given, **{**asked, "num_actions": ACTIONS})
    # SkyRL keeps an entropy at the predictor
    entropy = output["entropy"][:, -ACTIONS - 1 : -1]
    wanted = theirs.model, (logprobs, entropy)
    use_skyrl()
    ours = wrapper(copy.deepcopy(model))
    logprobs, output = ours(**given, **asked)
    found = ours.model, (logprobs, output["entropy"][:, -ACTIONS - 1 : -1])
    _compare(wanted, found, _weights(rows), 1e-4 if model_type == "qwen3_5" else 5e-6)
    quiet = ours(**given, **{**asked, "return_output": False})
    assert torch.equal(quiet.detach(), logprobs.detach())
    _, output = ours(**given, **asked, entropy_requires_grad=False)
    assert not output["entropy"].requires_grad
    with pytest.raises(pt.UnsupportedError, match="image_grid_thw: images"):
        ours(**given, **asked, image_grid_thw=torch.zeros(1))
    ours.sequence_parallel_size = 2
    with pytest.raises(pt.UnsupportedError, match="sequence_parallel_size=1"):
        ours(**given, **asked)


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_ms_swift(model_type: str, padding_free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = importlib.import_module(SWIFT).GRPOTrainer
    name = "_get_logps_via_local_forward"
    monkeypatch.setattr(trainer, name, getattr(trainer, name))
    rows, keep = _rows(), ACTIONS
    ids, mask = rows["sequences"], rows["attention_mask"]
    inputs = {"input_ids": ids, "attention_mask": mask}
    weights = _weights(rows)
    if padding_free:
        real = mask.bool()
        positions = (mask.cumsum(1) - 1)[real][None]
        inputs, keep = {"input_ids": ids[real][None], "position_ids": positions}, int(mask.sum())
        is_action = torch.zeros_like(mask)
        is_action[:, -ACTIONS:] = rows["action_mask"]
        draw = torch.Generator().manual_seed(2)
        weights = torch.randn(1, keep, 2, generator=draw) * is_action[real][None, :, None]
        # ms-swift cuts the first of all: the last column has no score behind it
        keep -= 1
        weights = weights[:, 1:]
    itself = object.__new__(trainer)
    itself.template = SimpleNamespace(padding_free=padding_free)
    itself.temperature, itself.model_kwarg_keys = 0.7, ["use_cache", "logits_to_keep"]
    found = []
    for use in (lambda: None, use_ms_swift):
        use()
        model = build(model_type, "eager")
        method = getattr(itself, name)
        logprobs, entropy = method(model, dict(inputs), keep, inputs["input_ids"], False)
        assert entropy is None
        found.append((model, (logprobs, torch.zeros_like(logprobs))))
    _compare(*found, weights)
    _, entropy = method(build(model_type, "eager"), inputs, keep, inputs["input_ids"], True)
    assert entropy.shape == logprobs.shape
    with pytest.raises(pt.UnsupportedError, match="pixel_values: images"):
        method(model, {**inputs, "pixel_values": ids}, keep, inputs["input_ids"], False)


@pytest.mark.parametrize("trainer", ["openrlhf", "skyrl"])
def test_the_launch_file_of_the_page(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the trainer gives to Ray stays, and the hook replaces its forward in a worker."""
    page = (Path(__file__).parents[3] / "docs/your-trainer.md").read_text()
    (text,) = re.findall(r"```py\n(import runpy, ray\n.*?)```", page, re.DOTALL)
    name = "openrlhf.cli.train_ppo_ray"
    assert name in text and "`use_skyrl`" in page
    if trainer == "skyrl":
        text = text.replace("use_openrlhf", "use_skyrl")
        name = "skyrl.train.entrypoints.main_base"
        assert f"`{name}`" in page
    assert any((Path(folder) / f"{name.replace('.', '/')}.py").exists() for folder in sys.path)
    given: list[Any] = []
    ray = SimpleNamespace(init=lambda **settings: given.append(settings))
    monkeypatch.setitem(sys.modules, "ray", ray)
    # as both trainers start
    start = lambda *args, **kwargs: ray.init(runtime_env={"env_vars": {"A": "1"}})  # noqa: E731
    monkeypatch.setattr(runpy, "run_module", start)
    exec(text, {})
    (settings,) = given
    hook = settings["runtime_env"].pop("worker_process_setup_hook")
    assert settings == {"runtime_env": {"env_vars": {"A": "1"}}}
    module, name = (WRAPPER, "HFModelWrapper") if trainer == "skyrl" else (ACTOR, "Actor")
    # a worker runs the hook before it imports the trainer's module, if it ever does
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    use = getattr(importlib.import_module(hook.rpartition(".")[0]), hook.rpartition(".")[2])
    use()
    use()
    assert module not in sys.modules
    owner = getattr(importlib.import_module(module), name)
    assert owner.forward in _OURS
    assert owner.forward.__wrapped__.__code__.co_filename == sys.modules[module].__file__
    assert not [f for f in sys.meta_path if type(f).__module__.startswith("prefixtree")]


def test_the_hook_imports_nothing_of_the_trainers() -> None:
    """Every worker of Ray runs it, those of vLLM too: DeepSpeed comes with a trainer's module."""
    code = (
        "import json, sys\n"
        "from prefixtree.integrations.batch_trainers import use_openrlhf, use_skyrl\n"
        "use_openrlhf(); use_skyrl()\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert "prefixtree" in found
    assert not {"deepspeed", "flash_attn", "openrlhf", "skyrl", "transformers"} & set(found)


@pytest.mark.parametrize("package", ["openrlhf", "openrlhf.models"])
def test_a_trainer_that_is_not_there(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said by the hook: no import would say it later."""
    if package == "openrlhf.models":
        (tmp_path / "openrlhf").mkdir()
        (tmp_path / "openrlhf/__init__.py").touch()
    for name in [n for n in sys.modules if n.partition(".")[0] == "openrlhf"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match=f"there is no {package}, whose class in"):
        use_openrlhf()


def test_a_shift_turns_it_red() -> None:
    """What `_compare` would say of scores one place off."""
    rows = _rows()
    model = build("qwen3", "prefixtree")
    scores = pt.batch_logprobs(
        model, rows["sequences"], rows["attention_mask"], return_entropy=True
    )
    assert scores.entropy is not None
    other = pt.batch_logprobs(model, rows["sequences"], rows["attention_mask"], return_entropy=True)
    assert other.entropy is not None
    right = scores.logprobs[:, -ACTIONS:], scores.entropy[:, -ACTIONS:]
    wrong = other.logprobs[:, -ACTIONS - 1 : -1], other.entropy[:, -ACTIONS - 1 : -1]
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        _compare((model, right), (model, wrong), _weights(rows))
