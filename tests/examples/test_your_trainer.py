"""The code of docs/your-trainer.md: it runs in order, with the gradients of every row alone."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

import prefixtree as pt
from tests.support.spawn import ROOT

PAGE = ROOT / "docs" / "your-trainer.md"
LENGTHS = (11, 14, 9, 12, 8)
PROMPTS = (0, 0, 0, 1, 1)
RATE = 0.5


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose configuration drops out, as some do."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=50, attention_dropout=0.1, **sizes, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _batch() -> dict[str, Any]:
    """Rows of two prompts, padded on the left and on the right."""
    draw = torch.Generator().manual_seed(1)
    size = (len(LENGTHS), max(LENGTHS) + 2)
    ids = torch.randint(1, 50, size, generator=draw)
    attention, loss_mask = torch.zeros(size, dtype=torch.long), torch.zeros(size)
    for row, (length, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
        left = row % 3
        ids[row, left : left + 6] = torch.arange(6) + 7 * prompt
        attention[row, left : left + length] = 1
        loss_mask[row, left + 6 : left + length : 1 + row % 2] = 1
    return {"input_ids": ids, "attention_mask": attention, "loss_mask": loss_mask}


def _names(path: Path) -> dict[str, Any]:
    return _batch() | {
        "path": path,
        "rank": 0,
        "world_size": 1,
        "device": torch.device("cpu"),
        "groups": PROMPTS,
        "advantages": [1.5, -0.5, 0.25, 2.0, -1.0],
        "temperature": 0.8,
        "make_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=RATE),
    }


def _follow(path: Path, *changes: tuple[str, str]) -> tuple[dict[str, Any], str]:
    """Runs the page's blocks, with pieces replaced; their names, and what they print."""
    text = PAGE.read_text()
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    names, printed = _names(path), io.StringIO()
    with contextlib.redirect_stdout(printed):
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(code, names)
    return names, printed.getvalue()


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def _alone(path: Path) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, norm of the gradient and weights after the step, each row alone in eager."""
    names = _names(path)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    total = torch.zeros(())
    scored = 0
    for row, keep in enumerate(names["attention_mask"].bool()):
        ids, mask = names["input_ids"][row, keep], names["loss_mask"][row, keep][1:]
        logits = model(ids[None], use_cache=False).logits[0, :-1] / names["temperature"]
        new = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        # the first ratio is 1: its surrogate's gradient is that of the advantage times log p
        ratio = torch.exp(new - new.detach())
        total = total - (names["advantages"][row] * ratio * mask).sum()
        scored += int(mask.sum())
    loss = total / scored
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    return float(loss.detach()), float(norm), {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("max_tokens", [16384, 20])
def test_the_ten_steps(max_tokens, path):
    names, printed = _follow(path, ("max_tokens=16384", f"max_tokens={max_tokens}"))
    assert len(names["plan"][0]) == (1 if max_tokens > 100 else 3)
    loss, norm, weights = _alone(path)
    assert float(names["total"]) == pytest.approx(loss, rel=1e-5)
    assert float(names["norm"].full_tensor()) == pytest.approx(norm, rel=1e-5)
    found = _weights(names["model"])
    assert max(float((found[n] - weights[n]).abs().max()) for n in weights) < 1e-6
    assert norm > 0.1
    # the one call, with the weights after the step
    rows = names["logprobs_of_rows"](names["model"])
    full = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    full.load_state_dict(found)
    for row, keep in enumerate(names["attention_mask"].bool()):
        ids = names["input_ids"][row, keep]
        logits = full(ids[None]).logits[0, :-1] / names["temperature"]
        want = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(rows[row, keep[1:]][-len(want) :], want, atol=1e-5, rtol=0)
    # as many steps as the title says, each with a check
    text = PAGE.read_text()
    assert re.findall(r"^### (\d+)\. ", text, re.MULTILINE) == [str(i) for i in range(1, 11)]
    assert text.count("*Check*: ") == 10
    assert type(names["model"]).__name__ == "FSDPQwen3ForCausalLM"
    shared = names["forest"].num_replicated_tokens / names["forest"].num_tokens
    assert printed.startswith(f"{shared:.2f} tokens per distinct token\n") and shared > 1.3
    assert re.search(r"replication ratio \d\.\d\d\n$", printed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("model = pt.prepare(AutoModel", "model = (AutoModel"), "'sdpa'"),
        (("config.attention_dropout = 0.0", "model.train()"), "config.attention_dropout is 0.1"),
        (
            ("MixedPrecisionPolicy(output_dtype=torch.float32)",
             "MixedPrecisionPolicy(output_dtype=torch.bfloat16)"),
            "a wrapper cast the log-probabilities",
        ),
        (("        model, packed, temp", "        model.model, packed, temp"), "a language-model"),
    ],
    ids=["attention", "dropout", "bfloat16", "inner module"],
)  # fmt: skip
def test_a_step_left_out_is_refused(change, message, path):
    with pytest.raises(pt.UnsupportedError, match=message):
        _follow(path, change)


def test_a_plan_for_fewer_ranks_is_refused(path):
    with pytest.raises(IndexError, match="rank 1 of a plan for 1 rank: plan with num_ranks="):
        _follow(path, ("plan[rank]", "plan[rank + 1]"))
