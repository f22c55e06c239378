"""Batches with sampling masks, next to verl's own engine whose logits are masked; on two ranks,
test_updates.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
from verl.utils import tensordict_utils as tu

from prefixtree.integrations.verl.batches import rows_of
from tests.integrations.verl.cases import MASK_CASES
from tests.integrations.verl.compare import check_same, difference
from tests.integrations.verl.runs import run


@pytest.mark.parametrize("name", ["grpo, masks", "grpo, masks, fixed size, AdamW"])
def test_an_update_is_verls_own_over_masked_logits(name: str, models: Path) -> None:
    settings = MASK_CASES[name]
    packed = run("prefixtree", models, settings)
    differences = check_same(run("stock", models, settings), packed, settings)
    print("DIFF", name, {k: f"{v:.1e}" for k, v in differences.items()})
    plain = run("prefixtree", models, replace(settings, masks=False))
    for name in ("old_log_probs", "ref_log_prob", "entropy"):
        masked, whole = packed["infer"][name], plain["infer"][name]
        assert difference(masked, whole) > 1
        # a row without sets
        assert difference(masked[-1:], whole[-1:]) < 1e-5


def test_what_an_agent_loop_adds_is_found() -> None:
    """Where verl's v1 trainers store it; a sample with which verl pads a batch needs none."""
    masks, fields = [[[7, 8], [7, 9]], [[5, 7], [], [7]], None], []
    for of_row in masks:
        length = len(of_row or [0])
        output = AgentLoopOutput(
            prompt_ids=[5, 6],
            response_ids=[7] * length,
            response_mask=[1] * length,
            metrics=AgentLoopMetrics(),
        )
        output.extra_fields["sampling_masks"] = of_row
        field = output.as_dict()
        ids = torch.cat([field["prompts"], field["responses"]])
        fields.append(field | {"input_ids": ids, "position_ids": torch.arange(len(ids))})
    padding, _ = construct_minimal_padding_template(fields[0], {}, eos_token_id=1)
    stored = [{name: of[name] for name in fields[0]} for of in (*fields, padding)]
    assert rows_of(tu.list_of_dict_to_tensordict(stored)).sampling_masks == [*masks, None]
