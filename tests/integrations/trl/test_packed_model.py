"""TRL's stand-in for a model: the batches it takes, and the trainers it refuses."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from prefixtree.errors import ForestError, UnsupportedError
from prefixtree.integrations.trl.data_set_trainers import PackedModel
from tests.integrations.trl.runs import sharing_report

OUTPUTS = ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs")


@pytest.fixture(scope="module")
def models(folder: Path) -> tuple[Any, Any]:
    """The model on forests, and as TRL has it."""
    found = []
    for implementation in ("prefixtree", "sdpa"):
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation)
        add_fused_lm_head(model, outputs=("log_probs", *OUTPUTS))
        found.append(model)
    return found[0], found[1]


def make_batch(rows: int = 4, length: int = 12) -> dict[str, torch.Tensor]:
    """Rows of several lengths that share five tokens, labelled from the fourth on."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 256, (rows, length), generator=g)
    ids[:, :5] = ids[0, :5]
    mask = (torch.arange(length) < torch.arange(length, length - rows, -1)[:, None]).long()
    labels = ids.where((mask == 1) & (torch.arange(length) > 2), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def test_every_entry_is_trls(models: tuple[Any, Any]) -> None:
    batch = make_batch()
    with torch.no_grad():
        # so that some tokens are the likeliest, and some are not
        likeliest = models[1](**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits
    batch["input_ids"][0, 8] = batch["labels"][0, 8] = likeliest[0, 7].argmax()
    metrics: dict[str, list[float]] = defaultdict(list)
    ours = PackedModel(models[0], OUTPUTS, sharing_report(metrics))(
        **batch, fused_lm_head=True, use_cache=False
    )
    theirs = models[1](**batch, fused_lm_head=True, use_cache=False)
    assert ours.keys() == theirs.keys() - {"loss"}
    assert ours.is_top1.any() and not ours.is_top1.all()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype, name
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-5)
    weights = torch.randn(2, *ours.log_probs.shape)
    gradients = [
        torch.autograd.grad(
            (weights[0] * out.log_probs + weights[1] * out.entropy).sum(), model.parameters()
        )
        for out, model in zip((ours, theirs), models, strict=True)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert metrics["prefixtree/replication_ratio"] == [42 / 27]


def test_only_what_is_asked_for(models: tuple[Any, Any]) -> None:
    metrics: dict[str, list[float]] = defaultdict(list)
    with torch.no_grad():
        packed = PackedModel(models[0], sharing=sharing_report(metrics))
        out = packed(**make_batch(), fused_lm_head=True)
    assert set(out.keys()) == {"log_probs", "label_mask"}
    # no gradients: an evaluation
    assert metrics["prefixtree/replication_ratio"] == []


def test_without_the_head_it_is_the_model(models: tuple[Any, Any]) -> None:
    batch = {k: v for k, v in make_batch().items() if k != "labels"}
    with torch.no_grad():
        logits = PackedModel(models[0])(**batch, use_cache=False).logits
        wanted = models[1](**batch, use_cache=False).logits
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(logits[kept], wanted[kept], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": None}, "the batch has no attention_mask: rows are packed from"),
        ({"seq_idx": torch.ones(1)}, "the batch has seq_idx, which is not packed yet"),
        ({"labels": None}, "the batch has no labels"),
        ({"pixel_values": torch.ones(1)}, "the batch has pixel_values, which is not packed yet"),
        ({"position_ids": torch.ones(1)}, "the batch has position_ids, which is not packed"),
        ({"output_router_logits": True}, "Qwen3ForCausalLM .* no load-balancing loss"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_entries(models: tuple[Any, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        PackedModel(models[0])(**{**make_batch(), **changes}, fused_lm_head=True)


def test_rows(models: tuple[Any, Any]) -> None:
    def call(**changes: torch.Tensor) -> None:
        PackedModel(models[0])(**{**make_batch(), **changes}, fused_lm_head=True)

    batch = make_batch()
    call()
    # one token further, and no row is padded on the right alone
    left = {name: value.roll(1, 1) for name, value in batch.items()}
    left["attention_mask"][:, 0] = 0
    with pytest.raises(UnsupportedError, match="row 0 begins with padding"):
        call(**left)
    labels = batch["labels"].clone()
    labels[1, 6] = 7
    with pytest.raises(UnsupportedError, match=r"labels\[1, 6\] is 7 where input_ids has"):
        call(labels=labels)
    labels = batch["labels"].clone()
    labels[3, 11] = batch["input_ids"][3, 11]
    with pytest.raises(UnsupportedError, match=r"labels\[3, 11\] .* and attention_mask 0"):
        call(labels=labels)
    mask = batch["attention_mask"].clone()
    mask[0, 1] = 0
    with pytest.raises(ForestError, match="a hole"):
        call(attention_mask=mask)


def test_joined_rows(models: tuple[Any, Any]) -> None:
    """As TRL's collator makes them of samples, of which the second ends a row of its own."""
    samples = make_batch()
    lengths = samples["attention_mask"].sum(1).tolist()
    ids, labels = (
        torch.cat([row[:n] for row, n in zip(samples[name], lengths, strict=True)])[None]
        for name in ("input_ids", "labels")
    )
    positions = torch.cat([torch.arange(n) for n in lengths])[None]

    def call(**changes: Any) -> Any:
        batch = {"input_ids": ids, "labels": labels, "position_ids": positions, **changes}
        return PackedModel(models[0], OUTPUTS)(**batch, fused_lm_head=True)

    alone = PackedModel(models[0], OUTPUTS)(**samples, fused_lm_head=True)
    borders = {"cu_seq_lens_q": positions, "max_length_k": 12, "seq_idx": positions}
    joined = call(**borders)
    for name, value in alone.items():
        assert torch.equal(joined[name][joined.label_mask], value[alone.label_mask]), name
    with pytest.raises(UnsupportedError, match=r"labels\[0, 12\] .* and position_ids 0: a label"):
        call(labels=labels.where(positions > 0, ids).index_fill(1, torch.tensor([0]), -100))
    with pytest.raises(UnsupportedError, match=r"labels\[0, 5\] is 7 where input_ids has"):
        call(labels=labels.index_fill(1, torch.tensor([5]), 7))
    with pytest.raises(ForestError, match="position_ids of row 0 jump to 9 at column 5"):
        call(position_ids=positions.index_fill(1, torch.tensor([5]), 9))
    with pytest.raises(ForestError, match=r"position_ids must be .* as input_ids, \[1, 42\], got"):
        call(position_ids=positions[:, :-1])
    with pytest.raises(ForestError, match=r"labels must be .* as input_ids, \[1, 42\], got"):
        call(labels=labels[:, :-1])
