"""The most bytes of an update, counted, against those that were planned; and what stays free."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import prefixtree as pt
from benchmarks.cases.pictures import config_of
from prefixtree.recompute.choose import memory_of as memory_of_model
from prefixtree.recompute.counted import LiveBytes
from prefixtree.recompute.image_work import ImageWork
from prefixtree.recompute.layers import MODES
from prefixtree.recompute.memory import EncoderMemory
from prefixtree.recompute.plan import (
    RecomputePlan,
    Work,
    peaks_of,
    plan_at,
    plan_for,
    reserve,
    spare_bytes,
)
from prefixtree.recompute.probes import memory_of_config
from tests.recompute.test_recompute import memory_of
from tests.support.hooks import limit
from tests.support.models import build

_GIB = 1 << 30


def _counted(model: Any, packed: pt.PackedForest, masks: list[np.ndarray], plan: Any) -> int:
    """The most bytes of an update, beside weights and gradients that are there."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    live = LiveBytes(x for p in model.parameters() for x in (p, p.grad))
    with live:
        scores = pt.sequence_logprobs(model, packed, loss_mask=masks, recompute=plan)
        torch.cat(scores.logprobs).sum().backward()
    return live.restart()


@pytest.mark.parametrize(
    "layers, vocabulary, place",
    [
        # the gradient of the lm_head waits for that of the embedding, beside a layer's backward
        pytest.param(3, 9000, -1, id="tied"),
        # what layers keep is there while the last norm has its backward
        pytest.param(3, 100, 0, id="norm", marks=pytest.mark.full),
    ],
)
def test_an_update_takes_what_was_planned(layers, vocabulary, place, monkeypatch):
    model: Any = build(
        "qwen3", num_hidden_layers=layers, vocab_size=vocabulary, tie_word_embeddings=True
    )
    model = model.to(torch.bfloat16).train()
    rng = np.random.default_rng(0)
    sequence = rng.integers(3, 90, 3000)
    packed = pt.pack(pt.PrefixForest.from_sequences([sequence]))
    # eight scored edges, whose logits are next to nothing
    limit(monkeypatch, "logits of plans", 1 << 12)
    masks = [np.arange(len(sequence)) >= len(sequence) - 8]
    memory = memory_of_model(model, model, packed.device)
    plan = plan_at(peaks_of(memory, Work(packed.forest, 8)), place % (layers + 1) ** 2)
    counted = _counted(model, packed, masks, plan)
    print(f"{plan}: counted {counted:,}, planned {plan.peak_bytes:,}")
    assert counted <= plan.peak_bytes < 1.1 * counted


@pytest.mark.parametrize("unit", [1 << 10, 1 << 26])
def test_plans_that_keep_anything_leave_something_free(unit):
    memory = memory_of([[(1, 8), (3, 6), (9, 2)]] * 4, 5, unit)
    work = Work(pt.PrefixForest.from_parents([-1], [100]), 1, trains_lm_head=False)
    least, most = (float(x) for x in (peaks_of(memory, work)[-1, -1], peaks_of(memory, work)[0, 0]))
    spare = (8 * unit * 100 + 3) / 2
    assert np.max(spare_bytes(memory, work, True)) == spare

    def planned(available: float) -> RecomputePlan:
        return plan_for(memory, work, available, with_spare=True)

    assert set(planned(least + 1).modes) == {"all"}
    assert set(planned(most + spare + 1).modes) == {"nothing"}
    assert set(planned(most + spare - 1).modes) != {"nothing"}
    assert set(plan_for(memory, work, most + 1).modes) == {"nothing"}


@pytest.mark.full
def test_an_h100_that_ran_out_of_memory():
    """Qwen3-VL-2B's shape with 78 screenshots (`python -m benchmarks images`): where 70.74 GiB
    were allocated, 7.44 GiB were in blocks that were too small for one of 654 MiB."""
    config = config_of(is_tiny=False)
    memory = memory_of_config(config, torch.bfloat16)
    # of its vision encoder, probed
    line = (815_303.0, 0.0)
    pairs = {"products": 328_728_576.0, "pairs": 49_152.0}
    encoder = EncoderMemory(line[0], 1 << 25, 16_384, torch.bfloat16, 813_914_112, line, **pairs)
    forest = pt.PrefixForest.from_parents([-1] + [0] * 96, [83_667 - 96 * 224] + [224] * 96)
    images = ImageWork(dict.fromkeys(range(78), 3520), 2 * 78 * 880, 0)
    work = Work(forest, 96 * 64, images=images)
    # beside the context of CUDA, weights, gradients and pixels
    free = round((79.18 - 0.75 - 8.72) * _GIB)
    available = free - reserve(round(79.18 * _GIB))
    plan = plan_for(memory, work, available, encoder, with_spare=True)
    assert plan.modes.count("all") == 0 and plan.modes.count("nothing") > 0
    assert plan.peak_bytes + 7.44 * _GIB + (654 << 20) < free
    assert set(plan.modes) <= set(MODES)
