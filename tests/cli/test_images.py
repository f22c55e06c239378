"""Rollouts with images in `report` and `verify`: counts, equality, and what is refused."""

import json
import re

import pytest

from prefixtree.demo.browser import write_rollouts
from tests.support.cli_runs import one_thread, run, run_json
from tests.support.cli_runs import write_rollouts as write_token_ids
from tests.support.hooks import put, wrap


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    write_rollouts(folder)
    return folder


@pytest.fixture
def command(folder):
    """The arguments that both commands take."""
    return [folder / "rollouts.jsonl", "--tokenizer", folder / "model"]


@pytest.fixture
def config(folder):
    return folder / "model" / "config.json"


def test_report_counts_images(command, config, tmp_path):
    facts = run_json("report", *command)
    tokens, images = facts["tokens"], facts["images"]
    assert images["images"] == {"replicated": 240, "packed": 120, "distinct": 30}
    assert images["patches"] == {"replicated": 57600, "packed": 28800, "distinct": 7200}
    assert images["tokens"] == {"replicated": 14400, "packed": 7200}
    # without images told apart more would be shared, and wrongly
    assert tokens["ratio"] == pytest.approx(2.84, abs=0.01)
    result = run("report", *command, "--model", config)
    assert result.exit_code == 0
    words = " ".join(result.stdout.replace("│", " ").split())
    assert "images 240 57,600 patches to encode without sharing" in words
    assert "distinct images 30 7,200 patches; they stand in 120 places of the forest" in words
    assert "image ratio 8.00x patches, without sharing / distinct" in words
    assert "the estimate leaves out the vision encoder, whose patches get 8.00x fewer" in words
    # what is quoted names images by number, and shows no placeholders and no ids
    assert "[image " in words and "image_pad" not in words
    plain = write_token_ids(tmp_path / "rollouts.jsonl")
    assert "images" not in run_json("report", plain)
    assert "patches" not in run("report", plain).stdout


@pytest.mark.full
def test_verify_with_images_is_green(command, config, monkeypatch):
    ran = []

    def watched(build, setting, attention):
        model = build(setting, attention)
        of_text, of_vision = model.config.text_config, model.config.vision_config
        ran.append((of_text._attn_implementation, of_vision._attn_implementation))
        return model

    wrap(monkeypatch, "model of a setting", watched)
    facts = run_json("verify", *command, "--model", config, "--limit", 3)
    assert ran == [("prefixtree", "sdpa"), ("sdpa", "sdpa"), ("eager_by_rows", "eager")]
    assert facts["passed"] is True
    assert facts["images"]["images"] == {"replicated": 15, "packed": 9, "distinct": 6}
    assert facts["checks"]["gradients"]["difference"] < 2e-5


@pytest.fixture
def no_estimate(monkeypatch):
    """Memory is estimated in the green run alone, which takes seconds."""
    monkeypatch.setattr("prefixtree.testing.verify.read_memory", lambda *_: None)


@pytest.mark.usefixtures("no_estimate")
def test_verify_turns_red_where_images_are_taken_for_one(command, config, monkeypatch):
    put(monkeypatch, "key of an image", lambda *_: b"all one")
    facts = run_json("verify", *command, "--model", config, "--limit", 2, exit_code=1)
    assert not facts["checks"]["logprobs"]["passed"]
    assert not facts["checks"]["gradients"]["passed"]


@pytest.mark.usefixtures("no_estimate")
def test_verify_prints_patches(command, config):
    result = run("verify", *command, "--model", config, "--limit", 2, "--per-turn")
    assert result.exit_code == 0
    assert "patches encoded" in result.stdout and "vision encoder takes" in result.stderr


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"image_token_id": 3}, "writes the placeholder 4; .* knows the placeholder 3; is it the"),
        (
            {"model_type": "qwen3", "text_config": None, "image_token_id": None},
            "writes the placeholder 4; .* knows no images; is it the",
        ),
        ({"text_config": {"vocab_size": 99}}, "the vocabulary of .* ends at 98"),
        ({"vision_config": {"spatial_merge_size": 4}}, "60 placeholders of one image with 15"),
        ({"model_type": "glm4v_moe", "vocab_size": 500}, "images are not verified in model type"),
    ],
)
def test_models_that_the_rollouts_do_not_fit(command, config, tmp_path, changes, message):
    whole = json.loads(config.read_text())
    for name, value in changes.items():
        whole[name] = {**whole[name], **value} if isinstance(value, dict) else value
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole))
    result = run("verify", *command, "--model", path, "--limit", 1)
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr
