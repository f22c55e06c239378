"""The one forward that is replaced, call by call, and the shuffle by groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config
from trl import GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.core.batch import Batch
from prefixtree.integrations.trl import PrefixTreeGRPOTrainer, kept_windows, micro_batches
from tests.integrations.trl.runs import VOCABULARY, make, parameters, rollouts, save_model

P, C = 9, 7


def batch(seed: int, dense: bool = False) -> dict[str, Any]:
    """Eight rows over three prompts, completions that share beginnings; one row is masked out, as
    truncated completions are, one is there twice."""
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(256, (3, P), generator=draw)[[0, 0, 0, 0, 1, 1, 2, 2]]
    completions = torch.randint(256, (8, C), generator=draw)
    completions[1, :3] = completions[0, :3]
    completions[2, :5] = completions[1, :5]
    lengths = torch.tensor([C, 5, 6, 3, 4, 4, 0, 1])
    padding = torch.tensor([0, 0, 0, 0, 4, 4, P - 1, P - 1])
    if dense:
        lengths[:], padding[:] = C, 0
    else:
        completions[5] = completions[4]
    mask = torch.cat(
        [torch.arange(P) >= padding[:, None], torch.arange(C) < lengths[:, None]], dim=1
    ).long()
    ids = torch.cat([prompts, completions], dim=1)
    # nothing may depend on what stands under the padding
    ids = torch.where(mask.bool(), ids, torch.randint(256, ids.shape, generator=draw))
    return {"input_ids": ids, "attention_mask": mask, "logits_to_keep": C}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Softcaps, a sliding window, scaled embeddings and tied weights."""
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=5,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=5.0,
        initializer_range=0.2,
        query_pre_attn_scalar=16,
        attn_implementation="eager",
    )
    return save_model(tmp_path_factory.mktemp("gemma2"), config)


@pytest.fixture
def pair(folder: Path) -> tuple[GRPOTrainer, GRPOTrainer]:
    return made(folder)


def made(folder: Path, **arguments: Any) -> tuple[GRPOTrainer, GRPOTrainer]:
    # sdpa has no softcaps: eager is TRL's side for every family
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs = make(GRPOTrainer, folder, model=model, **arguments)
    return make(PrefixTreeGRPOTrainer, folder, **arguments), theirs


def weigh(scores: tuple[torch.Tensor, torch.Tensor, None], seed: int = 5) -> torch.Tensor:
    """A loss to which every token's log-probability and entropy matters, differently."""
    draw = torch.Generator().manual_seed(seed)
    weights = torch.rand(2, *scores[0].shape, generator=draw)
    return (weights[0] * scores[0]).sum() + (weights[1] * scores[1]).sum()


@pytest.mark.parametrize("family", ["folder", "gemma"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_scores_and_gradients_are_trls(
    family: str, temperature: float, batch_size: int | None, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(family)
    results = []
    for trainer in made(path, temperature=temperature, gradient_checkpointing=False):
        trainer.model.train()
        scores = trainer._get_per_token_logps_and_entropies(
            trainer.model, **batch(1), batch_size=batch_size, compute_entropy=True
        )
        weigh(scores).backward()
        assert scores[2] is None
        grads = {n: p.grad.clone() for n, p in trainer.model.named_parameters()}
        results.append((scores[0].detach(), scores[1].detach(), grads))
    (logps, entropies, grads), (their_logps, their_entropies, their_grads) = results
    assert logps.shape == entropies.shape == (8, C) and logps.dtype == torch.float32
    assert float((logps - their_logps).abs().max()) < 5e-6
    assert float((entropies - their_entropies).abs().max()) < 5e-6
    padding = batch(1)["attention_mask"][:, P:] == 0
    assert logps[padding].eq(0).all() and entropies[padding].eq(0).all()
    assert logps[~padding].lt(-1e-3).all()
    for name, grad in their_grads.items():
        assert float((grads[name] - grad).norm()) < 1e-5 * float(grad.norm()), name


def test_without_entropies(pair: tuple[GRPOTrainer, GRPOTrainer]) -> None:
    with torch.no_grad():
        ours, theirs = (t._get_per_token_logps_and_entropies(t.model, **batch(2)) for t in pair)
    assert ours[1] is theirs[1] is ours[2] is theirs[2] is None
    assert torch.allclose(ours[0], theirs[0], atol=5e-6)


def test_a_micro_batch_without_a_token_to_score(pair: tuple[GRPOTrainer, GRPOTrainer]) -> None:
    """All completions masked out as truncated: zeros, which a backward still goes through."""
    nothing = batch(3)
    nothing["attention_mask"][:, P:] = 0
    for trainer in pair:
        trainer.model.train()
        scores = trainer._get_per_token_logps_and_entropies(
            trainer.model, **nothing, compute_entropy=True
        )
        assert scores[0].eq(0).all() and scores[1].eq(0).all()
        weigh(scores).backward()
        assert all(p.grad is None or p.grad.eq(0).all() for p in trainer.model.parameters())


def test_learned_positions_are_those_of_a_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL counts the padding on the left, which a learned position sees and a RoPE does not."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        initializer_range=0.2,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    ours, theirs = made(save_model(tmp_path, config))
    data = batch(10)
    with torch.no_grad():
        scores = ours._get_per_token_logps_and_entropies(ours.model, **data)[0]
        padded = theirs._get_per_token_logps_and_entropies(theirs.model, **data)[0]
        for row, (ids, mask) in enumerate(
            zip(data["input_ids"], data["attention_mask"], strict=True)
        ):
            alone = ids[mask.bool()][None]
            count = int(mask[P:].sum())
            if not count:
                continue
            wanted = theirs._get_per_token_logps_and_entropies(
                theirs.model, alone, torch.ones_like(alone), count
            )[0]
            assert torch.allclose(scores[row, :count], wanted[0], atol=5e-6)
            assert torch.allclose(padded[row, :count], wanted[0], atol=5e-6) == bool(mask[0])


@pytest.mark.usefixtures("unprobed")
def test_each_distinct_token_is_computed_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rows are packed `batch_size` at a time, as TRL forwards them, each with what it shares or
    with trunks; only what predicts a token of a completion goes through the head."""
    ours, _ = made(folder)
    rows: list[int] = []
    scored: list[int] = []
    embedding, head = ours.model.get_input_embeddings(), ours.model.get_output_embeddings()
    handles = [
        embedding.register_forward_pre_hook(lambda module, args: rows.append(args[0].numel())),
        head.register_forward_pre_hook(lambda module, args: scored.append(args[0].shape[1])),
    ]
    data = batch(4)
    sequences = [
        tuple(ids[mask.bool()].tolist())
        for ids, mask in zip(data["input_ids"], data["attention_mask"], strict=True)
    ]

    def distinct(part: list[tuple[int, ...]]) -> int:
        return len({s[:n] for s in part for n in range(1, len(s) + 1)})

    cut: list[tuple[int, int]] = []
    real = Batch.rows
    monkeypatch.setattr(
        Batch, "rows", lambda self, *where: cut.append(where[:2]) or real(self, *where)
    )
    with torch.no_grad():
        for batch_size in (None, 3):
            ours._trunks.keeps = False
            ours._get_per_token_logps_and_entropies(ours.model, **data, batch_size=batch_size)
        # a micro-batch of all rows is not cut out of them
        assert cut == [(0, 3), (3, 6), (6, 9)]
        several = len(rows)
        ours._trunks.keeps = True
        ours._get_per_token_logps_and_entropies(ours.model, **data, batch_size=3)
    for handle in handles:
        handle.remove()
    rows, kept = rows[:several], rows[several:]
    assert sum(kept) == rows[0] < sum(rows[1:]) and len(kept) > 3
    assert rows == [distinct(sequences), *(distinct(sequences[i : i + 3]) for i in (0, 3, 6))]
    assert rows[0] < sum(map(len, sequences)) / 1.7
    prompts = data["attention_mask"][:, :P].sum(1).tolist()
    predictors = {
        s[:n] for s, prompt in zip(sequences, prompts, strict=True) for n in range(prompt, len(s))
    }
    assert scored[0] == len(predictors) < rows[0]


def test_bfloat16_is_as_near_to_float32_as_trls(folder: Path) -> None:
    """Under autocast, as `bf16=True` trains: errors of scores and of all gradients."""
    errors: list[list[torch.Tensor]] = []
    exact = None
    for trainer in (made(folder)[1], *made(folder, bf16=True)):
        trainer.model.train()
        data = batch(6, dense=True)
        scores = trainer._get_per_token_logps_and_entropies(
            trainer.model, **data, compute_entropy=True
        )
        assert scores[0].dtype == torch.float32
        weigh(scores).backward()
        flat = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        results = [scores[0].detach(), scores[1].detach(), flat]
        exact = exact or results
        errors.append([(a - b).abs() for a, b in zip(results, exact, strict=True)])
    _, ours, theirs = errors
    assert float(theirs[0].mean()) > 1e-3  # it is bfloat16
    for mine, other in zip(ours, theirs, strict=True):
        assert float(mine.mean()) > 0.5 * float(other.mean())  # and so is this
        assert float(mine.mean()) < 1.2 * float(other.mean())
        assert float(mine.max()) < 2 * float(other.max())


def test_an_empty_prompt_is_refused(pair: tuple[GRPOTrainer, GRPOTrainer]) -> None:
    data = batch(7)
    data["attention_mask"][3, :P] = 0
    with pytest.raises(UnsupportedError, match="row 3 has an empty prompt"):
        pair[0]._get_per_token_logps_and_entropies(pair[0].model, **data)


def test_a_mask_with_a_hole_is_refused(pair: tuple[GRPOTrainer, GRPOTrainer]) -> None:
    """TRL makes none, and a packed row could not leave a token out."""
    data = batch(8)
    data["attention_mask"][0, P + 2] = 0
    with pytest.raises(ValueError, match="row 0 of attention_mask has a hole"):
        pair[0]._get_per_token_logps_and_entropies(pair[0].model, **data)


# ---- the shuffle ---------------------------------------------------------------------------------


def shuffled(count: int, chunks: int, seed: int) -> list[dict[str, Any]]:
    torch.manual_seed(seed)
    rows = torch.arange(count)
    generation = {
        "ids": rows[:, None] * 10,
        "row": rows,
        "num_items_in_batch": torch.tensor(7),
        "ref_per_token_logps": None,
        micro_batches.ROW: rows,
    }
    return split_tensor_dict(shuffle_sequence_dict(generation), chunks)


@pytest.mark.parametrize(("count", "chunks"), [(24, 6), (24, 2), (24, 24), (8, 1)])
def test_neighbours_meet_in_a_micro_batch(count: int, chunks: int) -> None:
    before = shuffled(count, chunks, seed=1)
    after = micro_batches.reunite(before)[0]
    size = count // chunks
    assert [b.keys() for b in after] == [b.keys() - {micro_batches.ROW} for b in before]
    for b in after:
        start = int(b["row"][0])
        assert start % size == 0 and b["row"].tolist() == list(range(start, start + size))
        assert torch.equal(b["ids"][:, 0], b["row"] * 10)
        assert b["num_items_in_batch"] == 7 and b["ref_per_token_logps"] is None
    # as TRL shuffled: a micro-batch comes where the first of its rows stood
    places = torch.cat([b["row"] for b in before]).tolist()
    starts = [int(b["row"][0]) for b in after]
    assert starts == [size * block for block in dict.fromkeys(row // size for row in places)]


def test_every_order_of_micro_batches_comes_up() -> None:
    seen = {
        tuple(int(b["row"][0]) // 2 for b in micro_batches.reunite(shuffled(6, 3, seed))[0])
        for seed in range(60)
    }
    assert seen == set(itertools.permutations(range(3)))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([["an image"]] * 4, "'extra' is a list"),
        (torch.zeros(3), "'extra' must have one row per completion"),
    ],
)
def test_an_unknown_batch_entry_is_refused(entry: Any, message: str) -> None:
    batches = shuffled(8, 2, seed=0)
    for b in batches:
        b["extra"] = entry
    with pytest.raises(UnsupportedError, match=message):
        micro_batches.reunite(batches)


# of micro-batches that cut groups, and share trunks
@pytest.mark.filterwarnings("ignore:.*micro-batch:UserWarning")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("cut", ["", "within a step", "over two steps"])
def test_the_ratio_of_a_policy_that_has_not_moved_is_one(
    folder: Path, bf16: bool, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: old log-probabilities come from the same forests, or the same trunks."""
    differences = []
    compute = GRPOTrainer._compute_loss
    score = PrefixTreeGRPOTrainer._get_per_token_logps_and_entropies
    scores: list[torch.Tensor] = []

    def keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = score(self, *args, **kwargs)
        scores.append(result[0].detach())
        return result

    def compare(self: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss = compute(self, model, inputs)
        differences.append(float((scores[-1] - inputs["old_per_token_logps"]).abs().max()))
        return loss

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        opened.append(self)

    over = cut == "over two steps"
    of_step = 2 if over or not cut else 4
    opened, real = [], kept_windows.KeptWindow.__init__
    monkeypatch.setattr(kept_windows.KeptWindow, "__init__", init)
    monkeypatch.setattr(PrefixTreeGRPOTrainer, "_get_per_token_logps_and_entropies", keep)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", compare)
    make(
        PrefixTreeGRPOTrainer,
        folder,
        bf16=bf16,
        options={"rollout_func": rollouts},
        max_steps=2 if over else 4,
        num_iterations=1 if over else 2,
        # two groups a micro-batch, or half of one
        num_generations=4 if cut else 2,
        per_device_train_batch_size=2 if cut else 4,
        gradient_accumulation_steps=of_step,
        steps_per_generation=4 if cut else 2,
    ).train()
    assert len(differences) == (2 if over else 4) * of_step
    steps = [differences[at : at + of_step] for at in range(0, len(differences), of_step)]
    assert not any(map(any, steps[::2]))
    assert min(map(min, steps[1::2])) > 1e-4
    assert bool(opened) == bool(cut)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Prompts of the micro-batches that a run was trained on."""
    seen: list[list[int]] = []
    compute = GRPOTrainer._compute_loss

    def spy(self: GRPOTrainer, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        assert micro_batches.ROW not in inputs
        keys = [tuple(ids.tolist()) for ids in inputs["prompt_ids"]]
        seen.append([sorted(set(keys)).index(key) for key in keys])
        return compute(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", spy)
    yield seen


def test_micro_batches_of_a_run_hold_whole_groups(folder: Path, order: list[list[int]]) -> None:
    make(PrefixTreeGRPOTrainer, folder, max_steps=4).train()
    assert len(order) == 8 and all(len(set(prompts)) == 1 for prompts in order)
    order.clear()
    make(GRPOTrainer, folder, max_steps=4).train()
    assert any(len(set(prompts)) > 1 for prompts in order)


def test_training_changes_nothing_but_parameters_that_train(folder: Path) -> None:
    """Scoring leaves no trace on the model: forwards, hooks, gradients of frozen parameters."""
    ours, _ = made(folder)
    ours.model.requires_grad_(False)
    ours.model.lm_head.requires_grad_(True)
    before = {name: vars(module).get("forward") for name, module in ours.model.named_modules()}
    ours.model.train()
    scores = ours._get_per_token_logps_and_entropies(ours.model, **batch(9), compute_entropy=True)
    weigh(scores).backward()
    assert before == {
        name: vars(module).get("forward") for name, module in ours.model.named_modules()
    }
    assert list(parameters(ours.model)) == ["lm_head.weight"]
    assert [n for n, p in ours.model.named_parameters() if p.grad is not None] == ["lm_head.weight"]
