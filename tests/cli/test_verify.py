"""`prefixtree verify`: green where packing is right, red where it is not."""

import json
import re

import numpy as np
import pytest
import torch

from prefixtree.forest import PrefixForest
from tests.support.cli_runs import one_thread, run, run_json, write_rollouts
from tests.support.full import mostly
from tests.support.hooks import limit, put
from tests.support.models import let_wrong_masks_run
from tests.support.warm import run_warm

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
LINES = {"logprobs": 1e-4, "entropy": 1e-4, "gradients": 1e-3, "whole gradient": 2e-4}


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def rollout_file(tmp_path_factory):
    return write_rollouts(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    """Of one configuration there is one path, which the memory of its layers is kept by."""
    paths = {}

    def write(**changes):
        text = json.dumps({**CONFIG, **changes})
        if text not in paths:
            paths[text] = tmp_path_factory.mktemp("model") / "config.json"
            paths[text].write_text(text)
        return paths[text]

    return write


def test_verify_is_green(rollout_file, config_file):
    config = config_file()
    facts = run_json("verify", "--model", config, rollout_file, "--per-turn")
    assert facts["passed"] is True
    assert facts["sequences"] == 8
    assert facts["tokens"]["replicated"] == 4 * (28 + 46)
    assert facts["tokens"]["scored"] == 4 * (4 + 16)
    assert set(facts["checks"]) == set(LINES)
    for (name, check), most in zip(facts["checks"].items(), LINES.values(), strict=True):
        assert check["passed"] and 0 <= check["difference"] < 2e-5, name
        assert check["limit"] == most and "replicated" not in check, name
    assert facts["checks"]["gradients"]["parameter"].startswith("model.")
    assert facts["packed"]["loss"] == pytest.approx(facts["replicated"]["loss"], rel=1e-5)
    for side in ("replicated", "packed"):
        assert facts[side]["seconds"] > 0
    assert facts["speedup"] > 0
    assert facts["left_out"] == 0


def test_verify_prints_a_verdict(rollout_file, config_file):
    result = run("verify", "--model", config_file(), rollout_file, "--limit", 3)
    assert result.exit_code == 0
    assert "3 sequences" in result.stdout and "replicated, sdpa" in result.stdout
    assert re.search(
        r"gradients +│ .*\n│ model\.[^…]+ │.*\n(│ \w+ .*\n)?│ whole gradient ", result.stdout
    )
    # a ratio below 1 saves nothing
    assert "ratio" in result.stdout and "saved" not in result.stdout
    assert "times on a CPU say little" in result.stdout
    assert result.stdout.splitlines()[-1] == "PASS"
    # before it starts
    (line,) = result.stderr.splitlines()
    assert line.startswith("verify: qwen3 in float32 on cpu, 3 sequences of 138 tokens, 90 dist")
    assert "3 runs" in line and re.search(r"takes about [\d.]+ GiB of memory", line)


def test_verify_with_gradient_checkpointing(rollout_file, config_file):
    facts = run_json("verify", "--model", config_file(), rollout_file, "--gradient-checkpointing")
    assert facts["passed"] and facts["gradient_checkpointing"]


@pytest.mark.parametrize("dtype", mostly(["bfloat16", "float16"], ["bfloat16"]))
def test_verify_in_a_shorter_dtype(rollout_file, config_file, dtype):
    facts = run_json("verify", "--model", config_file(), rollout_file, "--dtype", dtype)
    assert facts["passed"] and facts["dtype"] == dtype
    assert facts["replicated"]["logprob_difference"] > 1e-5
    # the limit follows the replicated run's own error
    assert facts["checks"]["logprobs"]["limit"] > 2e-3
    assert facts["checks"]["logprobs"]["difference"] > 1e-5


@pytest.mark.full
def test_verify_on_a_folder_of_weights(rollout_file, config_file, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "model"
    config = AutoConfig.from_pretrained(config_file())
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    facts = run_json("verify", "--model", folder, rollout_file)
    # the same weights whatever the seed: only the loss changes with it
    assert facts["passed"]
    again = run_json("verify", "--model", folder, rollout_file)
    assert again["replicated"]["loss"] == facts["replicated"]["loss"]


def test_verify_without_loss_masks_scores_every_token(tmp_path, config_file):
    path = tmp_path / "plain.jsonl"
    rows = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2], [1, 2], [9]]
    path.write_text("\n".join(json.dumps({"token_ids": row}) for row in rows))
    facts = run_json("verify", "--model", config_file(), path)
    assert facts["tokens"]["scored"] == 3 + 4 + 1 + 1


def test_tasks_and_limit_choose_sequences(rollout_file, config_file):
    config = config_file()

    def count(*options):
        return run_json("verify", "--model", config, rollout_file, *options)["sequences"]

    assert count("--tasks", 1) == 2
    assert count("--tasks", 1, "--per-turn") == 4
    assert count("--tasks", 2, "--per-turn", "--limit", 5) == 5


def nudge_a_logprob(scores):
    scores.logprobs[1].data[-1] += 1e-3


def nudge_an_entropy(scores):
    scores.entropy[0].data[-1] += 1e-3


def spoil_a_logprob(scores):
    scores.logprobs[1].data[-1] = float("nan")


def forget_a_gradient(scores):
    scores.logprobs[2] = scores.logprobs[2].detach()


@pytest.mark.parametrize(
    "damage, red, dtype",
    [
        (nudge_a_logprob, ["logprobs"], "float32"),
        (nudge_an_entropy, ["entropy"], "float32"),
        (spoil_a_logprob, ["logprobs"], "float32"),
        (forget_a_gradient, ["gradients", "whole gradient"], "float32"),
        pytest.param(spoil_a_logprob, ["logprobs"], "bfloat16", marks=pytest.mark.full),
        pytest.param(
            forget_a_gradient, ["gradients", "whole gradient"], "bfloat16", marks=pytest.mark.full
        ),
    ],
)
def test_verify_turns_red(monkeypatch, rollout_file, config_file, damage, red, dtype):
    from prefixtree.scoring import logprobs as adapter

    original = adapter.sequence_logprobs

    def damaged(model, packed, **options):
        scores = original(model, packed, **options)
        # the warm-up has one sequence
        if packed.forest.num_sequences > 1:
            damage(scores)
        return scores

    monkeypatch.setattr(adapter, "sequence_logprobs", damaged)
    arguments = ("verify", "--model", config_file(), rollout_file, "--dtype", dtype)
    facts = run_json(*arguments, exit_code=1)
    assert facts["passed"] is False
    assert [name for name, check in facts["checks"].items() if not check["passed"]] == red
    # no speed-up of a wrong result
    assert facts["speedup"] is None

    if damage is nudge_a_logprob:
        result = run(*arguments)
        assert result.exit_code == 1
        assert result.stdout.splitlines()[-1] == "FAIL"


@pytest.mark.parametrize("damage", [None, nudge_a_logprob, forget_a_gradient])
def test_rounding_beyond_the_limit(monkeypatch, rollout_file, config_file, damage):
    """Replicated in float32 is then as far from float64 as packed; a mistake is farther."""
    from prefixtree.scoring import logprobs as adapter
    from prefixtree.testing import judge

    original = adapter.sequence_logprobs

    def damaged(model, packed, **options):
        scores = original(model, packed, **options)
        if damage is not None and packed.forest.num_sequences > 1:
            damage(scores)
        return scores

    monkeypatch.setattr(judge, "FLOAT32", judge.Limits.alike(4e-7))
    monkeypatch.setattr(adapter, "sequence_logprobs", damaged)
    arguments = ("verify", "--model", config_file(), rollout_file)
    facts = run_json(*arguments, exit_code=0 if damage is None else 1)
    assert facts["reference"] == "float64" and facts["passed"] is (damage is None)
    for check in facts["checks"].values():
        assert check["limit"] == pytest.approx(2 * check["replicated"] + 4e-7)
        assert check["limit"] < 1e-4
    if damage is None:
        printed = run(*arguments).stdout.replace("\n", " ")
        assert "difference from float64" in printed and "compared with float64" in printed


def test_verify_turns_red_under_a_causal_mask(monkeypatch, rollout_file, config_file):
    """The mask that forgets the tree: every packed token sees all before it."""
    from prefixtree import pack
    from prefixtree.models import attention as adapter

    original = adapter.tree_attention

    def causal(q, k, v, mask, **options):
        chain = PrefixForest.from_parents([-1], [len(k)], tokens=[0] * len(k))
        return original(q, k, v, pack(chain).mask, **options)

    monkeypatch.setattr(adapter, "tree_attention", causal)
    let_wrong_masks_run(monkeypatch)
    facts = run_json("verify", "--model", config_file(), rollout_file, exit_code=1)
    assert not any(check["passed"] for check in facts["checks"].values())


@pytest.mark.parametrize(
    "changes, options, message",
    [
        ({"vocab_size": 200}, [], "rollouts.jsonl:1: has the token id 205, but the vocabulary of"),
        ({"model_type": "nonsense"}, [], "--model"),
        ({"model_type": None}, [], "--model"),
        ({"hidden_size": "wide"}, [], "Validation error for field 'hidden_size'"),
        ({}, ["--device", "nonsense"], "--device nonsense: "),
        ({}, ["--tasks", 0], "Invalid value for '--tasks'"),
        ({}, ["--dtype", "int8"], "Invalid value for '--dtype'"),
    ],
)
def test_what_verify_cannot_use_exits_2(rollout_file, config_file, changes, options, message):
    result = run("verify", "--model", config_file(**changes), rollout_file, *options)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_verify_needs_a_model_that_exists(rollout_file, tmp_path):
    result = run("verify", "--model", tmp_path / "nowhere", rollout_file)
    assert result.exit_code == 2
    assert result.stderr == (
        f"prefixtree: --model {tmp_path}/nowhere: does not exist; expected a folder, a file of "
        "one, or a name on the Hugging Face hub such as Qwen/Qwen3-0.6B\n"
    )
    # a folder with a configuration but without weights
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    result = run("verify", "--model", tmp_path, rollout_file)
    assert result.exit_code == 2
    assert "no file named model.safetensors" in result.stderr
    assert f"{tmp_path}/config.json in the folder's place gives random weights" in result.stderr


def test_a_name_that_is_not_in_the_cache(monkeypatch, rollout_file):
    from huggingface_hub import constants

    for offline, why in ((True, "HF_HUB_OFFLINE is set"), (False, "no connection to http")):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "is_offline_mode", lambda offline=offline: offline)
        for command in ("verify", "report"):
            result = run(command, "--model", "Qwen/Nowhere-1B", rollout_file)
            assert result.exit_code == 2 and result.stdout == ""
            assert "--model Qwen/Nowhere-1B: no such folder or file; as a name" in result.stderr
            assert f"cannot be downloaded ({why}" in result.stderr
        result = run("report", "--tokenizer", "Qwen/Nowhere-1B", rollout_file)
        assert result.exit_code == 2 and "--tokenizer Qwen/Nowhere-1B: no such" in result.stderr


@pytest.mark.full
def test_a_name_that_is_in_the_cache(tmp_path, rollout_file, config_file, monkeypatch):
    """As a download leaves it: a snapshot, and a reference that names it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.chat_tokenizer import CHATML, save_tokenizer

    cached = tmp_path / "hub" / "models--someone--tiny"
    snapshot = cached / "snapshots" / ("0" * 40)
    config = AutoConfig.from_pretrained(config_file())
    save_tokenizer(snapshot, CHATML)
    AutoModelForCausalLM.from_config(config).save_pretrained(snapshot)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    # the folder is read when transformers is imported
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from prefixtree.cli import app\n"
        "for command in ('verify', 'report'):\n"
        "    print(CliRunner().invoke(app, [command, *sys.argv[1:], '--json']).output)\n"
    )
    names = ["--model", "someone/tiny", "--tokenizer", "someone/tiny"]
    done = run_warm(code, *names, str(rollout_file))
    assert '"passed": true' in done.stdout and '"model_type": "qwen3"' in done.stdout, done


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_it_takes_was_said_before(tmp_path, dtype):
    """The estimate against the most that this process held beyond what it held before."""
    from prefixtree.testing.compare import Meter

    rng = np.random.default_rng(0)
    rows = [[i, *rng.integers(0, 9000, 1200).tolist()] for i in range(3)]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps({"token_ids": row}) + "\n" for row in rows))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIG, "vocab_size": 9000, "num_attention_heads": 8}))
    arguments = ("verify", "--model", config, path, "--dtype", dtype, "--device", "cpu")
    run_json(*arguments, "--limit", 1)
    with Meter(torch.device("cpu")) as meter:
        facts = run_json(*arguments)
    if meter.peak_bytes is not None:
        assert 0.5 < meter.peak_bytes / facts["estimated_bytes"] < 2


def test_a_device_is_chosen(monkeypatch):
    from prefixtree.testing.models import Setting

    for has_gpu, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert Setting("model").resolved().device == device


@pytest.mark.parametrize(
    "device, dtype, first",
    [
        ("cpu", "bfloat16", "sdpa"),
        ("cuda", "bfloat16", "flash_attention_2"),
        ("cuda", "float32", "sdpa"),
    ],
)
def test_what_trainers_run(monkeypatch, device, dtype, first):
    """FA2 where it can be, sdpa, and eager where transformers refuses both."""
    from prefixtree.testing import models

    tried = []

    def refuse(setting, attention):
        tried.append(attention)
        if attention != "eager":
            raise ValueError("this model does not support it")
        return attention

    put(monkeypatch, "model of a setting", refuse)
    assert models.build_as_trained(models.Setting("m", dtype, device)) == "eager"
    assert tried == [first, "sdpa", "eager"][first == "sdpa" :]


def test_an_attention_that_computes_something_else_is_said(monkeypatch, rollout_file, config_file):
    """The verdict is eager's, whatever the side that is timed computes."""
    from prefixtree.testing import verify

    original = verify.build_as_trained

    def other(setting):
        model = original(setting)
        model.lm_head.weight.data *= 1.5
        return model

    monkeypatch.setattr(verify, "build_as_trained", other)
    facts = run_json("verify", "--model", config_file(), rollout_file)
    assert facts["passed"] and facts["replicated"]["logprob_difference"] > 1e-2
    printed = " ".join(run("verify", "--model", config_file(), rollout_file).stdout.split())
    assert "transformers' sdpa itself is " in printed and printed.endswith("PASS")


def test_verify_says_what_it_does_not_support(rollout_file, config_file):
    config = config_file(model_type="stablelm", bos_token_id=1, eos_token_id=2)
    result = run("verify", "--model", config, rollout_file)
    assert result.exit_code == 2
    assert "stablelm" in result.stderr and "Traceback" not in result.stderr


def test_verify_needs_something_scored(tmp_path, config_file):
    path = tmp_path / "unscored.jsonl"
    path.write_text(json.dumps({"token_ids": [1, 2, 3], "loss_mask": [1, 0, 0]}))
    result = run("verify", "--model", config_file(), path)
    assert result.exit_code == 2
    assert "loss_mask scores no token" in result.stderr


# ---- the comparison itself -----------------------------------------------------------------------


def test_the_replicated_run_is_plain_autograd(monkeypatch, config_file):
    """The chunked backward against one differentiation of the whole loss."""
    from prefixtree.testing import compare
    from prefixtree.testing.models import Setting, build
    from prefixtree.testing.verify import random_objective

    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 300, n) for n in (9, 1, 14, 2)]
    masks = [rng.random(len(s)) < 0.6 for s in sequences]
    model = build(Setting(str(config_file()), device="cpu"), "eager")
    objective = random_objective(sequences, masks, seed=3)
    # chunks of two rows
    limit(monkeypatch, "logits of rows", 600)
    found = compare.run_replicated(model, sequences, objective)

    loss = torch.zeros(())
    for i, tokens in enumerate(torch.from_numpy(s) for s in sequences):
        log_p = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        chosen = log_p.gather(-1, tokens[1:, None]).squeeze(-1)
        scored = torch.from_numpy(masks[i][1:])
        torch.testing.assert_close(found.logprobs[i], chosen * scored)
        torch.testing.assert_close(found.entropy[i], entropy * scored)
        loss = loss + objective.logprob_weights[i] @ chosen + objective.entropy_weights[i] @ entropy
    loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    expected = {name: p.grad for name, p in model.named_parameters()}
    differences = compare.gradient_differences(found.gradients, expected)
    assert len(differences) == len(expected) and max(differences.values()) < 1e-5
    assert found.peak_bytes is None or found.peak_bytes >= 0


def test_gradient_differences():
    from prefixtree.testing.compare import gradient_differences

    big, one = torch.tensor([3e6, 4e6]), torch.tensor([1.0])
    expected = {"big": big, "noise": one, "none": None, "missing": torch.tensor([3e6])}
    found = {"big": big * 1.5, "noise": one * 3, "none": None, "missing": None}
    differences = gradient_differences(found, expected)
    assert set(differences) == {"big", "noise", "missing"}
    assert differences["big"] == pytest.approx(0.5)
    assert differences["missing"] == pytest.approx(1.0)
    # its own norm is noise: measured against the whole gradient's
    assert differences["noise"] == pytest.approx(2 / np.hypot(5e6, 3e6))

    # a gradient where none should be
    assert gradient_differences({"a": one, "b": one}, {"a": one, "b": None})["b"] == 1.0
    nothing = {"a": torch.zeros(2)}
    assert gradient_differences(nothing, nothing) == {"a": np.inf}
    spoiled = {"a": torch.tensor([float("nan")])}
    assert gradient_differences(spoiled, {"a": one}) == {"a": np.inf}


def test_the_whole_gradient_is_one_vector():
    from prefixtree.testing.compare import whole_gradient_difference

    expected = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0]), "c": None}
    assert whole_gradient_difference(expected, expected) == (0, {"a": 0, "b": 0})
    # a parameter that is off by all of itself, and one of none
    found = {"a": torch.tensor([3.0, 0.0]), "b": None, "c": torch.tensor([3.0])}
    whole, each = whole_gradient_difference(found, expected)
    assert whole == pytest.approx(1.0) and each == {"a": 0, "b": 1, "c": pytest.approx(0.6)}
    spoiled = expected | {"b": torch.tensor([float("nan")])}
    assert whole_gradient_difference(spoiled, expected)[0] == np.inf
    nothing = {"a": torch.zeros(2)}
    assert whole_gradient_difference(nothing, nothing)[0] == np.inf


def test_worst_difference():
    from prefixtree.testing.compare import worst_difference

    a = [torch.tensor([1.0, 2.0]), torch.tensor([])]
    assert worst_difference(a, a) == 0
    assert worst_difference([a[0] + torch.tensor([0.0, -0.5]), a[1]], a) == 0.5
    assert worst_difference([torch.tensor([1.0, float("nan")]), a[1]], a) == np.inf
    assert worst_difference(a, a[::-1]) == np.inf
    assert worst_difference(a[1:], a[1:]) == 0
