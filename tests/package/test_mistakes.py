"""What newcomers get wrong ends in an error that names the mend, or works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

import prefixtree as pt
from tests.support.models import build, reward_model
from tests.support.warm import run_warm

ROWS = [[5, 6, 7], [5, 6, 8]]
IDS = torch.tensor(ROWS)
ONES = torch.ones_like(IDS)
FOREST = pt.PrefixForest.from_sequences(ROWS)
PACKED = pt.pack(FOREST)
MODEL = build("qwen3")
ENCODED = BatchEncoding({"input_ids": ROWS, "attention_mask": ONES.tolist()})


def nested(layout: torch.layout = torch.strided) -> torch.Tensor:
    return torch.nested.nested_tensor([IDS[0], IDS[1, :2]], layout=layout)


def without_numbers(model_type: str = "qwen3") -> Any:
    """A model on the meta device."""
    return build(model_type).to("meta")


def kept(batches: Any) -> None:
    with pt.kept_trunks(without_numbers(), batches) as scored:
        list(scored)


TRUNKS = pt.plan_micro_batches(ROWS, 4, trunks=True)[0]
UNPREPARED = build("qwen3", "sdpa")
_NO_NUMBERS = (
    "embed_tokens.weight is on the meta device, .* from_pretrained, or call model.to_empty"
)
_PLAIN = r"prefixtree\.batch_logprobs.*torch\.no_grad\(\), or with model\.set_attn_impl"
_UNBIND = r"is a nested tensor: give its parts, list\(\w+\.unbind\(\)\)"
MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # ---- the packed forest
    "model and forest exchanged": (
        lambda: pt.sequence_logprobs(PACKED, MODEL),
        TypeError,
        "got Qwen3ForCausalLM; the model comes first",
    ),
    "a padded batch": (
        lambda: pt.sequence_logprobs(MODEL, IDS),
        TypeError,
        r"got Tensor; .* batch_logprobs\(model, input_ids, attention_mask\) takes a padded",
    ),
    "a tokenizer's batch": (
        lambda: pt.sequence_logprobs(MODEL, ENCODED),
        TypeError,
        "got BatchEncoding; .* takes a padded batch",
    ),
    "cuda()": (lambda: PACKED.cuda(), AttributeError, r"no attribute 'cuda'; \.to\(\"cuda\"\)"),
    "half()": (lambda: PACKED.half(), AttributeError, "numbers are integers"),
    "to(dtype)": (lambda: PACKED.to(torch.float16), TypeError, r"got torch\.float16: .*model\.to"),
    "to(model)": (lambda: PACKED.to(MODEL), TypeError, r'as "cuda" or model\.device, got Qwen3'),
    "to(None)": (lambda: PACKED.mask.to(None), TypeError, "got NoneType"),
    "sequences to the class": (
        lambda: pt.PrefixForest(ROWS),
        TypeError,
        r"from_sequences\(sequences\) makes one",
    ),
    # ---- sequences
    "a nested tensor": (
        lambda: pt.PrefixForest.from_sequences(nested()),
        pt.ForestError,
        _UNBIND,
    ),
    "a jagged tensor": (
        lambda: pt.PrefixForest.from_sequences(nested(torch.jagged)),
        pt.ForestError,
        _UNBIND,
    ),
    "a list of tokenizers' batches": (
        lambda: pt.PrefixForest.from_sequences([ENCODED]),
        pt.ForestError,
        r'sequences\[0\] is a BatchEncoding; .*give its "input_ids"',
    ),
    "generators": (
        lambda: pt.PrefixForest.from_sequences([iter(row) for row in ROWS]),
        pt.ForestError,
        r"sequences\[0\] holds no numbers; .*a list, an array or a tensor",
    ),
    "ids without numbers": (
        lambda: pt.PrefixForest.from_sequences([IDS[0].to("meta")]),
        pt.ForestError,
        r"sequences\[0\] is on the meta device",
    ),
    # ---- batches
    "a batch as one argument": (
        lambda: pt.batch_logprobs(MODEL, ENCODED),
        TypeError,
        r"got BatchEncoding: .*as \*\*batch",
    ),
    "text": (lambda: pt.batch_logprobs(MODEL, "hello", ONES), TypeError, "tensor .*, got str"),
    "a packed forest as a batch": (
        lambda: pt.batch_logprobs(MODEL, PACKED),
        TypeError,
        r"got PackedForest: .*sequence_logprobs\(model, packed\) takes",
    ),
    "a nested mask": (
        lambda: pt.sequence_logprobs(MODEL, PACKED, loss_mask=nested()),
        pt.ForestError,
        _UNBIND,
    ),
    "a nested batch": (lambda: pt.batch_logprobs(MODEL, nested(), ONES), pt.ForestError, _UNBIND),
    "a sparse batch": (
        lambda: pt.batch_logprobs(MODEL, IDS.to_sparse(), ONES),
        pt.ForestError,
        r"sparse tensor: give input_ids\.to_dense\(\)",
    ),
    # ---- models
    "None, which compile_layers returns": (
        lambda: pt.sequence_logprobs(None, PACKED),
        TypeError,
        "got NoneType; .*compile_layers changes a model in place",
    ),
    "a class": (lambda: pt.prepare(type(MODEL)), TypeError, "got the class Qwen3ForCausalLM"),
    "a class to size": (
        lambda: pt.max_micro_batch_tokens(type(MODEL)),
        TypeError,
        "got the class Qwen3ForCausalLM",
    ),
    "no prepare": (
        lambda: pt.sequence_logprobs(UNPREPARED, PACKED),
        pt.UnsupportedError,
        r"attn_implementation='sdpa'\); call prefixtree\.prepare\(model\) once",
    ),
    "a model to cost": (
        lambda: pt.CostModel.from_config(MODEL),
        ValueError,
        r"does not say .*; give model\.config",
    ),
    "an ordinary batch with padding": (
        lambda: MODEL(input_ids=IDS, attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]])),
        ValueError,
        _PLAIN,
    ),
    "an ordinary batch without": (
        lambda: MODEL(input_ids=IDS, attention_mask=ONES),
        ValueError,
        _PLAIN,
    ),
    "the tree's mask as attention_mask": (
        lambda: MODEL(input_ids=PACKED.input_ids[None], attention_mask=PACKED.mask),
        AttributeError,
        "a model takes it as tree_mask=, never as attention_mask=",
    ),
    # ---- models without numbers
    "scores": (lambda: pt.sequence_logprobs(without_numbers(), PACKED), ValueError, _NO_NUMBERS),
    "steps": (
        lambda: pt.sequence_logprobs(without_numbers(), PACKED, max_step_tokens=3),
        ValueError,
        _NO_NUMBERS,
    ),
    "lists": (lambda: pt.batch_logprobs(without_numbers(), ROWS, ONES), ValueError, _NO_NUMBERS),
    "costs": (lambda: pt.import_cost(without_numbers()), ValueError, _NO_NUMBERS),
    "sizes": (lambda: pt.max_micro_batch_tokens(without_numbers()), ValueError, _NO_NUMBERS),
    "kept trunks": (lambda: kept(TRUNKS), ValueError, _NO_NUMBERS),
    "a teacher": (lambda: pt.Teacher(without_numbers(), PACKED), ValueError, _NO_NUMBERS),
    "samples": (
        lambda: pt.TreeSampler(without_numbers(), 99).start(FOREST),
        ValueError,
        _NO_NUMBERS,
    ),
    "values": (
        lambda: pt.sequence_values(reward_model("qwen3").to("meta"), PACKED),
        ValueError,
        _NO_NUMBERS,
    ),
    # ---- names
    "a name with a slip": (lambda: pt.pak, AttributeError, "did you mean pack"),
    "a name of another module": (
        lambda: pt.allow_model_type,
        AttributeError,
        "write from prefixtree.integrations.transformers import allow_model_type",
    ),
    "a trainer": (
        lambda: pt.PrefixTreeDPOTrainer,
        AttributeError,
        "write from prefixtree.integrations.trl import PrefixTreeDPOTrainer",
    ),
    "an adapter": (
        lambda: pt.integrations.megatron,
        AttributeError,
        "write import prefixtree.integrations.megatron first",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", MISTAKES)
def test_the_mend_is_named(name: str) -> None:
    run, kind, mend = MISTAKES[name]
    with pytest.raises(kind, match=mend):
        run()


def test_lists_and_arrays_are_a_batch() -> None:
    wanted = pt.batch_logprobs(MODEL, IDS, ONES).logprobs
    assert torch.equal(pt.batch_logprobs(MODEL, ROWS, ONES.tolist()).logprobs, wanted)
    assert torch.equal(pt.batch_logprobs(MODEL, IDS.numpy(), ONES.numpy()).logprobs, wanted)


def test_names_that_readme_has() -> None:
    assert pt.TreeSampler is pt.sampling.TreeSampler and pt.Draws is pt.sampling.Draws


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_sequences_beyond_learned_positions(family: str) -> None:
    model = build(family, max_position_embeddings=8)
    fits = pt.pack(pt.PrefixForest.from_sequences([list(range(3, 11))]))
    longer = pt.pack(pt.PrefixForest.from_sequences([list(range(3, 12))]))
    pt.sequence_logprobs(model, fits)
    match = rf"9 tokens, and {family} has learned positions for 8 .*cut or leave out"
    short = reward_model(family)
    short.config.max_position_embeddings = 8
    calls: list[Callable[[], Any]] = [
        lambda: pt.sequence_logprobs(model, longer),
        lambda: pt.sequence_logprobs(model, longer, max_step_tokens=4),
        lambda: pt.sequence_values(short, longer),
        lambda: pt.TreeSampler(model, 99).start(longer.forest),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=match):
            call()
    rows = pt.TreeSampler(model.eval(), 99).start(FOREST)
    with pytest.raises(ValueError, match="9 tokens, max_new_tokens counted, and"):
        rows.generate(6)
    rows.generate(5)


@pytest.mark.full
def test_after_a_reload() -> None:
    """As Jupyter's autoreload does: what was made before is of another class of the same name."""
    code = """
import importlib
import prefixtree as pt
from prefixtree.packing import layout, mask
forest = pt.PrefixForest.from_sequences([[1, 2]])
old, score = pt.pack(forest).mask, pt.sequence_logprobs
importlib.reload(mask), importlib.reload(layout)
packed = layout.pack(forest)
for check in (lambda: score(None, packed), lambda: mask.check_mask(old)):
    try:
        check()
    except TypeError as problem:
        print(problem)
"""
    forest, tree_mask = run_warm(code).stdout.splitlines()
    assert "got a PackedForest of before prefixtree was reloaded" in forest
    assert "got a TreeMask of before prefixtree was reloaded" in tree_mask
    assert "restart Python" in forest and "restart Python" in tree_mask


@pytest.mark.full
def test_a_pickled_model_where_nothing_imports_prefixtree(tmp_path: Path) -> None:
    model = pt.prepare(build("qwen3", "sdpa")).eval()
    torch.save(model, tmp_path / "model.pt")
    code = f"""
import torch
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
with torch.no_grad():
    print(model(torch.tensor([[5, 6, 7]])).logits.shape)
"""
    run = run_warm(code)
    assert "torch.Size([1, 3, 97])" in run.stdout, run.stderr
