"""GRPO that samples on a forest: its tokens, log-probabilities and replies, and whole runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from trl import GRPOTrainer

from prefixtree import PrefixForest, UnsupportedError, compile_layers, pack, sequence_logprobs
from prefixtree.integrations.trl import PrefixTreeGRPOTrainer, tree_rollouts
from prefixtree.sampling import TreeSampler
from tests.integrations.trl.runs import (
    assert_equal_runs,
    make,
    prompts,
    save_model,
    tiny_hybrid,
)
from tests.support.hooks import limit, put, wrap
from tests.support.recorded_graphs import RecordedGraphs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def chats(count: int) -> list[Any]:
    """The first two prompts, each so many times, as TRL hands them over."""
    return [chat for chat in prompts()["prompt"][:2] for _ in range(count)]


def logprobs_of(trainer: GRPOTrainer, found: dict[str, Any], temperature: float) -> Any:
    """The log-probabilities of the completions in training, and the sampler's."""
    sequences = [a + b for a, b in zip(found["prompt_ids"], found["completion_ids"], strict=True)]
    packed = pack(PrefixForest.from_sequences(sequences))
    with torch.no_grad():
        scores = sequence_logprobs(trainer.model, packed, temperature=temperature)
    want = [
        row[-len(ids) :] for row, ids in zip(scores.logprobs, found["completion_ids"], strict=True)
    ]
    return torch.cat(want), torch.tensor([x for row in found["logprobs"] for x in row])


def test_tokens_and_logprobs(folder: Path) -> None:
    trainer = make(PrefixTreeGRPOTrainer, folder, temperature=0.8, max_completion_length=12)
    trainer.model.train()
    torch.manual_seed(0)
    found = tree_rollouts(chats(4), trainer)
    assert found.keys() == {"prompt_ids", "completion_ids", "logprobs"}
    assert found["prompt_ids"] == trainer._tokenize_prompts(chats(4))[0]
    lengths = [len(ids) for ids in found["completion_ids"]]
    ended = [ids[-1] in trainer.eos_token_ids for ids in found["completion_ids"]]
    assert all(length == 12 or end for length, end in zip(lengths, ended, strict=True))
    # samples of one prompt differ
    assert len({tuple(ids) for ids in found["completion_ids"][:4]}) > 1
    want, got = logprobs_of(trainer, found, 0.8)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    # as the trainer left it
    assert trainer.model.training
    torch.manual_seed(0)
    assert tree_rollouts(chats(4), trainer) == found
    assert tree_rollouts(chats(4), trainer) != found


def test_greedy_tokens_are_those_of_trl(folder: Path) -> None:
    trainer = make(PrefixTreeGRPOTrainer, folder, temperature=1e-5, max_completion_length=12)
    ids, images, fields = trainer._tokenize_prompts(chats(2))
    want, _ = trainer._generate_single_turn(ids, images, fields, 2)
    assert tree_rollouts(chats(2), trainer)["completion_ids"] == want


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_models_with_states(family: str, tmp_path: Path) -> None:
    """Greedy tokens are TRL's, and log-probabilities those of training, over turns with replies."""
    folder = save_model(tmp_path, tiny_hybrid(family))
    trainer = make(PrefixTreeGRPOTrainer, folder, temperature=1e-5, max_completion_length=6)
    ids, images, fields = trainer._tokenize_prompts(chats(2))
    want, _ = trainer._generate_single_turn(ids, images, fields, 2)
    assert tree_rollouts(chats(2), trainer)["completion_ids"] == want
    trainer = make(PrefixTreeGRPOTrainer, folder, temperature=0.8, max_completion_length=12)
    trainer.eos_token_ids = list(range(0, 256, 5))
    found = tree_rollouts(chats(3), trainer, reply=lambda row, said: [7, 8][: row % 3])
    sampled = torch.tensor([m for row in found["env_mask"] for m in row]).bool()
    assert sampled.any() and not sampled.all()
    want, got = logprobs_of(trainer, found, 0.8)
    torch.testing.assert_close(got[sampled], want[sampled], atol=3e-5, rtol=0)


def test_prompts_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(PrefixTreeGRPOTrainer, folder)
    read = []
    start = TreeSampler.start

    def spied(self: TreeSampler, forest: PrefixForest) -> Any:
        read.append(forest)
        return start(self, forest)

    monkeypatch.setattr(TreeSampler, "start", spied)
    found = tree_rollouts(chats(4), trainer)
    (forest,) = read
    once = {tuple(ids) for ids in found["prompt_ids"]}
    assert len(once) == 2 and forest.num_sequences == 8
    # the system prompt is one, too
    assert forest.num_tokens < sum(map(len, once))


def test_steps_are_captured_once_per_trainer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates, longer prompts and TRL's way with checkpointing between two calls are no reason to
    capture again; another trainer, more rows and too little memory are."""
    monkeypatch.setattr(RecordedGraphs, "made", [])
    put(monkeypatch, "graphs of steps", RecordedGraphs)
    made = RecordedGraphs.made
    options = {"rollout_func": tree_rollouts}
    trainer = make(PrefixTreeGRPOTrainer, folder, options=options, gradient_checkpointing=True)
    trainer.train()
    (graphs,) = made
    captured = graphs.num_captured
    assert captured and graphs.replays > captured
    tree_rollouts(chats(2), trainer)
    again = make(PrefixTreeGRPOTrainer, folder)
    tree_rollouts(chats(2), again)
    assert len(made) == 2 and graphs.num_captured == captured
    tree_rollouts(chats(16), trainer)
    assert len(made) == 3
    limit(monkeypatch, "kept of a sampler", 0.0)
    tree_rollouts(chats(16), trainer)
    tree_rollouts(chats(16), trainer)
    assert len(made) == 4


def test_replies(folder: Path) -> None:
    """They are read and not sampled; a rollout ends where nothing is said, or no room is left."""
    trainer = make(PrefixTreeGRPOTrainer, folder, max_completion_length=40, temperature=1.3)
    # every token of a third of the vocabulary ends a turn
    trainer.eos_token_ids = list(range(0, 260, 3))
    heard: dict[int, list[list[int]]] = {}

    def reply(row: int, completion: list[int]) -> list[int] | None:
        assert completion[-1] % 3 == 0
        heard.setdefault(row, []).append(completion)
        return None if row == 0 else [256, row, 255]

    found = tree_rollouts(chats(3), trainer, reply=reply)
    assert set(heard) == set(range(6)) and len(heard[0]) == 1
    assert max(map(len, heard.values())) > 2
    for row, (ids, mask) in enumerate(zip(found["completion_ids"], found["env_mask"], strict=True)):
        assert len(ids) == len(mask) <= 40
        assert ids[: len(heard[row][-1])] == heard[row][-1]
        said = [ids[at : at + 3] for at in range(len(ids)) if mask[at] == 0 and mask[at - 1]]
        assert said == [[256, row, 255]] * len(said) and mask.count(0) == 3 * len(said)
        assert row == 0 or len(said) >= len(heard[row]) - 1
        assert all(
            p == 0 for p, sampled in zip(found["logprobs"][row], mask, strict=True) if not sampled
        )
    want, got = logprobs_of(trainer, found, 1.3)
    sampled = torch.tensor([x for mask in found["env_mask"] for x in mask]).bool()
    torch.testing.assert_close(got[sampled], want[sampled], atol=2e-5, rtol=0)


@pytest.mark.parametrize("turns", [False, True])
def test_a_run(folder: Path, turns: bool) -> None:
    """The first update of a generation sees ratios of 1, and the model moves."""
    function: Any = tree_rollouts
    if turns:
        function = partial(tree_rollouts, reply=lambda row, said: [65, 66])
    trainer = make(
        PrefixTreeGRPOTrainer,
        folder,
        options={"rollout_func": function},
        num_iterations=1,
        max_steps=3,
        learning_rate=1e-2,
    )
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 3 and all(log["reward"] > 0 and log["reward_std"] > 0 for log in logs)
    # the sampler's log-probabilities are those that TRL trains with
    assert all(log["clip_ratio/region_mean"] == 0 for log in logs)
    after = trainer.model.parameters()
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert min(log["prefixtree/replication_ratio"] for log in logs) > 1.2


# dynamo's own look at .grad of its inputs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_steps_in_compiled_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs for all layers and steps: of decode steps, and of updates, which keep trunks. The
    embedding's output asks for a gradient, as TRL wants it for checkpointing, in sampling too."""
    returned, runs = [], []

    def note(real: Any, *given: Any) -> Any:
        returned.append(real(*given))
        return returned[-1]

    wrap(monkeypatch, "returned gradients of rows", note)
    for compiled in (False, True):
        trainer = make(
            PrefixTreeGRPOTrainer,
            folder,
            options={"rollout_func": tree_rollouts, "recompute": "auto"},
            num_iterations=1,
            max_steps=2,
        )
        if compiled:
            torch._dynamo.reset()
            counters.clear()
            returned.clear()
            compile_layers(trainer.model, backend="eager")
        trainer.train()
        runs.append(trainer)
    assert returned and counters["frames"]["total"] == counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    torch._dynamo.reset()
    assert_equal_runs(*runs)


def test_what_only_generate_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_refusals.py has the settings that the sampler lacks."""
    trainer = make(PrefixTreeGRPOTrainer, folder)
    monkeypatch.setattr(trainer, "_is_vlm", True)
    with pytest.raises(UnsupportedError, match="pass the tokenizer as processing_class"):
        tree_rollouts(chats(1), trainer)


def test_a_model_of_another_attention(folder: Path) -> None:
    trainer = make(GRPOTrainer, folder)
    trainer.model.train()
    with pytest.raises(UnsupportedError, match="prefixtree"):
        tree_rollouts(chats(1), trainer)
    assert trainer.model.training
