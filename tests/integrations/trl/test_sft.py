"""SFT: the adapter's trainer against TRL's, through `train()` and `evaluate()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTTrainer

from prefixtree.integrations.trl import PrefixTreeSFTTrainer
from tests.integrations.trl.runs import (
    assert_equal_runs,
    moved,
    parameters,
    save_model,
    tiny_mixture,
    worst_parameter,
)
from tests.integrations.trl.sample_runs import (
    SFT,
    make_sft,
    ratios,
    rows_of_calls,
    turns,
)
from tests.support.chat_tokenizer import CHATML
from tests.support.full import mostly
from tests.support.models import build

# marks what an assistant says, with the end of its turn
_MARKED = CHATML.replace(
    "{{ m.content }}", "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
).replace("<|im_end|>\n{% endfor %}{% if add", "{% endfor %}{% if add")


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_a_run_is_trls_own(folder: Path, optimizer: str) -> None:
    ours, theirs = SFT.both(
        folder,
        optim=optimizer,
        learning_rate=0.3 if optimizer == "sgd" else 1e-3,
        eval_strategy="steps",
        eval_steps=2,
        options={"eval_dataset": turns(3)},
    )
    rows = rows_of_calls(ours.model)
    ours.train()
    theirs.train()
    assert type(theirs) is SFTTrainer
    assert moved(theirs, folder) > 1e-3
    assert theirs.state.log_history[-2]["eval_mean_token_accuracy"] > 0
    assert_equal_runs(ours, theirs)
    # two conversations of three turns, of which the last holds the others
    assert min(ratios(ours)) > 1.6
    # 2 steps of 2 batches, and an evaluation of 2
    assert rows == [1] * 6


@pytest.mark.parametrize(
    "arguments",
    [
        # which smooths no labels
        {"loss_type": "dft", "label_smoothing_factor": 0.1},
        {"completion_only_loss": False},
        {"train_sampling_strategy": "random", "shuffle_dataset": True},
        # steps whose batches have other numbers of rows and of labels
        {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 3},
        {"average_tokens_across_devices": False},
        {"max_length": 70, "pad_to_multiple_of": 8},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_checkpointing_kwargs": {"selective": True}},
    ],
    ids=lambda arguments: "-".join(map(str, [*arguments, *arguments.values()])),
)
def test_settings(folder: Path, arguments: dict[str, Any]) -> None:
    ours, theirs = SFT.trained(folder, **arguments)
    assert moved(theirs, folder) > 1e-3
    assert_equal_runs(ours, theirs)


JOINED: dict[str, dict[str, Any]] = {
    "padding_free": {"padding_free": True, "max_length": None},
    "padded to a multiple": {"padding_free": True, "max_length": None, "pad_to_multiple_of": 8},
    "bfd": {"packing": True},
    "bfd_split": {"packing": True, "packing_strategy": "bfd_split", "max_length": 90},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 200},
    "wrapped, padding_free": {
        **{"packing": True, "packing_strategy": "wrapped", "max_length": 200},
        "padding_free": True,
    },
    "experts": {"padding_free": True, "max_length": None, "router_aux_loss_coef": 3.0},
}


@pytest.mark.parametrize("optimizer", mostly(["sgd", "adamw_torch"], ["sgd"]))
@pytest.mark.parametrize("name", mostly(JOINED, ["padded to a multiple"]))
@pytest.mark.filterwarnings("ignore:the first optimiser step shared nothing")
@pytest.mark.filterwarnings("ignore:packing=True")
@pytest.mark.usefixtures("unprobed")
def test_joined_rows(tmp_path: Path, name: str, optimizer: str) -> None:
    """Rows of several samples, which still share what begins alike; evaluation has its own."""
    folder = save_model(tmp_path, tiny_mixture() if name == "experts" else None)
    arguments = {
        "per_device_train_batch_size": 3 if "packing" in JOINED[name] else 6,
        "max_length": 400,
        "optim": optimizer,
        "learning_rate": 0.3 if optimizer == "sgd" else 1e-3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "options": {"eval_dataset": turns(3)},
        **JOINED[name],
    }
    ours, theirs = SFT.both(folder, **arguments)
    rows = rows_of_calls(ours.model)
    ours.train()
    theirs.train()
    assert moved(theirs, folder) > 1e-3
    assert_equal_runs(ours, theirs)
    assert set(rows) == {1}
    # rows of `wrapped` begin anywhere
    assert min(ratios(ours)) > (1.2 if "wrapped" not in name else 0.99)


def test_whole_conversations_and_the_assistants_mask(folder: Path) -> None:
    """One sample per conversation, several answers to one question: all answers are learnt."""
    rows = [
        {"messages": [*row["prompt"], *row["completion"], question, answer]}
        for row in turns(2)
        for question in [{"role": "user", "content": "why"}]
        for answer in [{"role": "assistant", "content": f"say {i}"} for i in range(3)]
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = _MARKED
    arguments = {
        "options": {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    }
    ours, theirs = SFT.trained(folder, assistant_only_loss=True, **arguments)
    labels = [row["labels"] for row in ours.train_dataset]
    assert all(-100 in row and max(row) > 0 for row in labels)
    assert_equal_runs(ours, theirs)
    assert min(ratios(ours)) > 2
    everything = make_sft(PrefixTreeSFTTrainer, folder, **arguments)
    everything.train()
    assert worst_parameter(ours, everything)[0] > 1e-3


def test_token_ids_with_labels(folder: Path) -> None:
    """A data set with labels of its own: a sample without any, and a batch without any."""
    trainer = make_sft(SFTTrainer, folder)
    rows = [
        {"input_ids": row["input_ids"], "labels": row["labels"]} for row in trainer.train_dataset
    ]
    rows[1]["labels"] = [-100] * len(rows[1]["labels"])
    rows[6:] = [{**row, "labels": [-100] * len(row["labels"])} for row in rows[6:]]
    ours, theirs = SFT.trained(
        folder,
        options={"train_dataset": Dataset.from_list(rows)},
        gradient_accumulation_steps=1,
        # or TRL drops these samples
        max_length=None,
    )
    assert moved(theirs, folder) > 1e-3
    assert [log["loss"] > 0 for log in ours.state.log_history[:2]] == [True, False]
    assert_equal_runs(ours, theirs)


def test_a_token_counts_once_per_sample(folder: Path) -> None:
    """The same sample three times beside another: the shared tokens weigh three times."""
    trainer = make_sft(SFTTrainer, folder)
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in trainer.train_dataset]
    thrice, once = [rows[2], rows[2], rows[2], rows[5]], [rows[2], rows[5]]
    arguments = {"gradient_accumulation_steps": 1, "max_steps": 1}
    ours, theirs = SFT.trained(
        folder, options={"train_dataset": Dataset.from_list(thrice)}, **arguments
    )
    assert_equal_runs(ours, theirs)
    assert ratios(ours)[0] > 2
    other = make_sft(
        PrefixTreeSFTTrainer,
        folder,
        options={"train_dataset": Dataset.from_list(once)},
        **arguments,
    )
    other.train()
    assert worst_parameter(ours, other)[0] > 1e-4


def test_an_adapter(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    runs = []
    for trainer in (PrefixTreeSFTTrainer, SFTTrainer):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
        options = {"peft_config": config}
        runs.append(make_sft(trainer, folder, options=options, learning_rate=1.0))
        runs[-1].train()
    b = max(float(p.abs().max()) for n, p in parameters(runs[1].model).items() if "lora_B" in n)
    assert b > 1e-3
    assert_equal_runs(*runs)


@pytest.mark.parametrize(
    "model_type",
    mostly(["mistral3/of ministral3", "gemma3", "internvl"], ["mistral3/of ministral3"]),
)
def test_the_text_of_a_vision_checkpoint(folder: Path, model_type: str) -> None:
    """The whole model and a tokenizer, which makes no images."""
    runs = []
    for kind, attention in ((SFT.ours, "sdpa"), (SFT.stock, "eager")):
        size = len(AutoTokenizer.from_pretrained(folder)) + 3
        # transformers' whole Gemma 3 caps no logits, TRL's head would
        model = build(model_type, attention, vocab_size=size, final_logit_softcapping=None)
        before = parameters(model)
        run = make_sft(kind, folder, model=model)
        run.train()
        after = parameters(run.model)
        assert max(float((after[name] - before[name]).abs().max()) for name in after) > 1e-3
        runs.append(run)
    assert_equal_runs(*runs)
