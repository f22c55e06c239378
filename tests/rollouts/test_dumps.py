"""Texts and pickles of trainers. Files that a trainer's code wrote are in tests/integrations: TRL's
and veRL's, SkyRL's in batch_trainers. slime cannot be installed here: `slime_dump` stands in for
slime/observability/rollout_data_utils.py:140-154 and Sample.to_dict of slime/utils/types.py:222-227
(commit 624b824a)."""

from __future__ import annotations

import os
import pickle
from enum import Enum

import pytest
import torch

from prefixtree.errors import InputError
from prefixtree.rollouts import expand_turns, read_rollouts
from tests.rollouts.conftest import as_lists
from tests.support.cli_runs import run_json


def texts(rollouts, tokenizer):
    """The text of each rollout, up to what its loss mask selects and from there on."""
    pairs = zip(rollouts.sequences, rollouts.loss_masks, strict=True)
    return [
        (tokenizer.decode(tokens[~mask].tolist()), tokenizer.decode(tokens[mask].tolist()))
        for tokens, mask in pairs
    ]


# ---- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "after"),
    [
        ({"prompt": "Q: 2?", "completion": " two"}, " two<|im_end|>"),
        ({"prompt": "Q: 2?", "completion": " two<|im_end|>"}, " two<|im_end|>"),
        # logged by TRL: as it was sampled
        ({"prompt": "Q: 2?", "completion": " two", "advantage": 0.5, "step": 3}, " two"),
        ({"input": "Q: 2?", "output": " two", "gts": None, "score": 1.0, "step": 1}, " two"),
        ({"input_prompt": "Q: 2?", "output_response": " two<|im_end|>"}, " two<|im_end|>"),
    ],
    ids=["data set", "with its end", "TRL", "veRL", "SkyRL"],
)
def test_a_text_and_what_follows(read, chat_tokenizer, row, after):
    rollouts = read(row)
    assert texts(rollouts, chat_tokenizer) == [("Q: 2?", after)]
    assert (
        expand_turns(rollouts, strict=True).sequences[0].tolist() == as_lists(rollouts.sequences)[0]
    )


def test_a_token_over_the_border_of_a_data_set_is_the_completions(read, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    from prefixtree.rollouts.chat import ChatTokenizer

    # "b" and "c" are one token where they meet
    words = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "bc": 3}, [("b", "c")]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "r.jsonl"
    path.write_text('{"prompt": "ab", "completion": "c"}\n{"prompt": "ab", "completion": "c", ')
    with path.open("a") as file:
        file.write('"advantage": 1}\n')
    rollouts = read_rollouts(path, strict=True, tokenizer=ChatTokenizer(tmp_path))
    assert as_lists(rollouts.sequences) == [[0, 3], [0, 1, 2]]
    assert as_lists(rollouts.loss_masks) == [[False, True], [False, False, True]]


@pytest.mark.parametrize("prompt", [{"prompt": "Who? "}, {}])
def test_a_pair_of_texts(read, chat_tokenizer, prompt):
    before = "" if prompt else "Who? "
    rollouts = read({"chosen": before + "He.", "rejected": before + "It.", **prompt})
    assert rollouts.ids == ["line 1 chosen", "line 1 rejected"]
    assert rollouts.groups == ["line 1"] * 2
    # without a prompt, the space before the words that differ is theirs
    asked, space = ("Who? ", "") if prompt else ("Who?", " ")
    expected = [(asked, f"{space}{who}<|im_end|>") for who in ("He.", "It.")]
    assert texts(rollouts, chat_tokenizer) == expected


def test_samples_of_one_prompt_are_a_group(read):
    """As trainers write them, without a name; those of a data set are not."""
    told = {"score": 1, "step": 1}
    dump = [{"input": prompt, "output": answer, **told} for prompt in "ab" for answer in "cd"]
    assert read(*dump).groups == ["line 1", "line 1", "line 3", "line 3"]
    chat = [{"role": "user", "content": "a"}]
    said = [[{"role": "assistant", "content": answer}] for answer in "cd"]
    logged = [{"prompt": chat, "completion": answer, "advantage": 0.1} for answer in said]
    assert read(*logged).groups == ["line 1", "line 1"]
    assert read(*({**row, "group": 3} for row in logged)).groups == [3, 3]
    assert read(*({"prompt": "a", "completion": answer} for answer in "cd")).groups is None


def test_texts_need_a_tokenizer_and_text(write, read):
    row = {"prompt": "a", "completion": "b"}
    with pytest.raises(InputError, match="has text and no token ids; give a tokenizer folder"):
        read_rollouts(write(row), strict=True)
    with pytest.raises(InputError, match="prompt must be text, as what goes with it is; got int"):
        read({"prompt": 3, "chosen": "b", "rejected": "c"})


def test_other_rows_with_an_input_and_an_output_are_not_verls(read):
    with pytest.raises(InputError, match=r"expected token_ids, .* got the fields input, output"):
        read({"input": "a", "output": "b"})


# ---- pickles -------------------------------------------------------------------------------------


class Status(Enum):
    COMPLETED = "completed"


def slime_dump(path, *samples):
    """As torch.save writes it: a zip with a pickle, whose tensors are files beside it."""
    torch.save({"rollout_id": 3, "samples": list(samples)}, path)
    return path


def sample(tokens, count, **fields):
    more = {"status": "completed", "spec_info": {"completion_token_num": count}, "reward": 1.0}
    return {"tokens": tokens, "response_length": count, "loss_mask": None, **more, **fields}


def test_slimes_rollouts(tmp_path):
    path = slime_dump(
        tmp_path / "3.pt",
        sample([1, 2, 3, 4], 2, group_index=7, index=20, rollout_top_p_token_ids=torch.ones(3)),
        # a tool's reply between two turns
        sample([1, 2, 5, 6, 7], 3, group_index=7, index=21, loss_mask=[1, 0, 1]),
        # what the reader does not know, it does not load
        sample([1, 2], 0, metadata={"status": Status.COMPLETED, "path": tmp_path}),
    )
    rollouts = read_rollouts(path, strict=True)
    assert as_lists(rollouts.sequences) == [[1, 2, 3, 4], [1, 2, 5, 6, 7], [1, 2]]
    assert [mask.nonzero()[0].tolist() for mask in rollouts.loss_masks] == [[2, 3], [2, 4], []]
    assert rollouts.groups == [7, 7, None] and rollouts.ids == ["sample 20", "sample 21", "line 3"]
    assert as_lists(rollouts.turn_ends) == [[4], [3, 5], []]
    assert run_json("report", path)["tokens"]["distinct"] == 7
    # a rollout that was aborted before its prompt was tokenized
    slime_dump(path, sample([], 0), sample([1], 0))
    assert len(read_rollouts(path).problems) == 1


class Runs:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    "save", [torch.save, lambda what, path: path.write_bytes(pickle.dumps(what))]
)
def test_a_pickle_runs_nothing(tmp_path, monkeypatch, save):
    monkeypatch.chdir(tmp_path)
    save({"samples": [sample([1, 2], 1, extra=Runs())]}, tmp_path / "r.pt")
    assert as_lists(read_rollouts(tmp_path / "r.pt", strict=True).sequences) == [[1, 2]]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps({"rollout_data": []}), "is a pickle of another kind; expected what slime"),
        (pickle.dumps([1]), "is a pickle of another kind"),
        (pickle.dumps({"samples": [{}]}), "cannot be read as a pickle: KeyError: 'tokens'"),
        (pickle.dumps({"samples": [1]})[:-5], "cannot be read as a pickle: "),
        (b"PK\x03\x04 and more", "cannot be read as a pickle: BadZipFile"),
    ],
)
def test_pickles_of_others(tmp_path, data, message):
    path = tmp_path / "x.pkl"
    path.write_bytes(data)
    with pytest.raises(InputError, match=f"x.pkl: {message}"):
        read_rollouts(path)
