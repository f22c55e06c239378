"""`TreeSampler` on models with recurrent layers: rows that stop, branch, hear replies and go on,
against the model's own eager forward of each history alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree.kernels.recurrence.protocol import RowSlots
from prefixtree.sampling import Draws, Samples, TreeSampler, forest_cache
from prefixtree.sampling import rows as rows_module
from prefixtree.sampling.forest_cache import StatePools
from prefixtree.sampling.growing_forest import GrowingForest
from tests.sampling.cases import same_samples, turns
from tests.support.full import each_once
from tests.support.hooks import limit
from tests.support.models import build, mostly_full

# a delta rule, one per channel, Mamba-2, convolutions beside sliding windows
_KINDS = ("qwen3_5", "kimi_linear", "nemotron_h", "lfm3")
_STOP = (5, 11, 17, 23, 31, 41, 51, 61)


def worst(model: Any, samples: Samples, temperature: float = 1.0) -> float:
    """The largest difference of a sampled token's log-probability from that of the history alone,
    by the model's own code."""
    model.set_attn_implementation("eager")
    error = 0.0
    for i, tokens in enumerate(samples.sequences):
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0, :-1].float()
        alone = (logits / temperature).log_softmax(-1)
        alone = alone.gather(1, torch.from_numpy(tokens)[1:, None])[:, 0]
        mask = samples.loss_masks[i][1:]
        assert mask.any()
        error = max(error, float((alone - samples.logprobs[i])[mask].abs().max()))
    model.set_attn_implementation("prefixtree")
    return error


@pytest.fixture
def full_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that stopped stay in the batch, as on a GPU for a while."""
    limit(monkeypatch, "rows that fill a batch", 0.0)


@pytest.mark.parametrize(
    ("model_type", "narrow"),
    each_once(mostly_full(_KINDS, {"qwen3_5", "nemotron_h", "lfm3"}), [True, False]),
)
def test_every_token_over_three_turns(
    model_type: str, narrow: bool, monkeypatch: pytest.MonkeyPatch, poison: Any
) -> None:
    """With replies of several tokens, of one and of none. What a pool holds beside is NaN."""
    if not narrow:
        limit(monkeypatch, "rows that fill a batch", 0.0)
    model = build(model_type).eval()
    samples = turns(model, Draws(0.8, seed=2), stop=_STOP)
    assert len({int(mask.sum()) for mask in samples.loss_masks}) > 3 and poison.tensors
    assert worst(model, samples, 0.8) < 3e-5


def test_states_of_stopped_rows_that_move_show(
    full_batches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume = StatePools.resume

    def all_live(pools: StatePools, rows: RowSlots) -> None:
        resume(pools, rows._replace(live=torch.ones_like(rows.live)))

    model = build("qwen3_5").eval()
    monkeypatch.setattr(StatePools, "resume", all_live)
    assert worst(model, turns(model, Draws(seed=2), stop=_STOP)) > 1e-2


def test_a_slot_that_branched_rows_share_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = GrowingForest.reserve

    def sharing(growing: GrowingForest, rows: Any, rooms: Any) -> Any:
        moved = reserve(growing, rows, rooms)
        for row in rows:
            growing._leave(growing._targets[row], growing._slots[row])
            growing._targets[row] = growing._slots[row]
        return moved

    monkeypatch.setattr(GrowingForest, "reserve", sharing)
    model = build("qwen3_5").eval()
    assert worst(model, turns(model, Draws(seed=2), stop=_STOP)) > 1e-2


@pytest.mark.parametrize("kind", ["_states", "_tails"])
def test_states_and_tails_that_enter_nothing_show(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of both is read, in a decode step and where a reply is read."""
    model = build("nemotron_h").eval()
    for begin in ("read", "resume"):
        rows = TreeSampler(model, 500).start(pt.PrefixForest.from_sequences([[7, 8, 9, 10, 11]]))
        if begin == "read":
            rows.append({0: [12, 13]})
        original = getattr(StatePools, begin)

        def without(pools: StatePools, *args: Any, original: Any = original) -> None:
            for pool in getattr(pools, kind).pools:
                pool.zero_()
            original(pools, *args)

        with monkeypatch.context() as patch:
            patch.setattr(StatePools, begin, without)
            rows.generate(1 if begin == "read" else 2, Draws(seed=1))
        assert worst(model, rows.samples()) > 1e-2


def test_branching_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows take slots as they go on; rows that are dropped give theirs back."""
    model = build("qwen3_5").eval()
    sampler = TreeSampler(model, 3000)
    rows = sampler.start(pt.PrefixForest.from_sequences([[3, 4, 5], [6, 7]]))
    pools = sampler._forward.cache.states
    before = [pool.clone() for pool in pools.pools]
    addresses = pools.addresses
    rows.branch(5)
    assert pools.addresses == addresses
    assert all(map(torch.equal, before, pools.pools))
    rows.generate(3, Draws(seed=1))
    assert pools._slots == 13 and pools.addresses != addresses
    addresses = pools.addresses
    rows.drop(range(2, 10))
    rows.branch(4)
    rows.generate(2, Draws(seed=1))
    assert pools.addresses == addresses


def test_a_start_takes_the_pools_of_the_last_one() -> None:
    model = build("qwen3_5").eval()
    sampler = TreeSampler(model, 3000)
    found = []
    for _ in range(2):
        samples = sampler.sample([[3, 4, 5, 6], [3, 4, 9]], 4, 6, Draws(seed=1))
        found.append((samples, sampler._forward.cache.addresses))
    assert same_samples(found[0][0], found[1][0]) and found[0][1] == found[1][1]


# ---- refusals and interruptions ------------------------------------------------------------------


def test_no_memory_for_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before anything is sampled, and fewer rows go on as if nothing had happened."""
    model = build("qwen3_5").eval()
    rows = TreeSampler(model, 3000).start(pt.PrefixForest.from_sequences([[3, 4, 5]]))
    original = forest_cache.empty

    def little(like: torch.Tensor, *shape: int) -> torch.Tensor:
        if shape[0] > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(like, *shape)

    monkeypatch.setattr(forest_cache, "empty", little)
    rows.branch(20)
    with pytest.raises(MemoryError, match=r"^21 states of rows, 0\.0 MB each, need 0\.0 GB: drop"):
        rows.generate(3)
    assert not rows.new_tokens(0)
    rows.drop(range(4, 20))
    rows.generate(3, Draws(seed=1))
    assert worst(model, rows.samples()) < 3e-5
    with pytest.raises(MemoryError, match=r"^9 states of rows, .* need at least 0\.0 GB"):
        TreeSampler(model, 100).start(pt.PrefixForest.from_sequences([[i] for i in range(3, 12)]))


def _interrupt(number: int) -> Any:
    """A hook that interrupts its call of this number."""
    calls: list[None] = []

    def hook(*_: Any) -> None:
        calls.append(None)
        if len(calls) == number:
            raise KeyboardInterrupt

    return hook


@pytest.mark.parametrize("number", [1, 6])
def test_an_interruption_within_a_step_ends_the_rows(number: int) -> None:
    """States of some layers have seen a token that others have not. The samples stay; `number` 1
    is where a reply is read."""
    model = build("qwen3_5").eval()
    rows = TreeSampler(model, 500).start(pt.PrefixForest.from_sequences([[3, 4, 5], [6, 7]]))
    rows.append({0: [8, 9]})
    layer = model.model.language_model.layers[1]
    with layer.register_forward_pre_hook(_interrupt(number)), pytest.raises(KeyboardInterrupt):
        rows.generate(8, Draws(seed=1))
    lengths = [len(s) for s in rows.samples().sequences]
    assert lengths == ([5, 2] if number == 1 else [10, 7])
    with pytest.raises(RuntimeError, match="while recurrent layers read tokens"):
        rows.generate(1)


def test_an_interruption_between_steps_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_5").eval()
    sampler, forest = TreeSampler(model, 500), pt.PrefixForest.from_sequences([[3, 4, 5], [6, 7]])
    rows = sampler.start(forest)
    rows.generate(9, Draws(seed=1))
    whole = rows.samples()
    rows = sampler.start(forest)
    monkeypatch.setattr(sampler._steps, "graphs", None)
    look = _interrupt(4)
    monkeypatch.setattr(rows_module.DecodeStep, "size_for", lambda *args: (look(), 10**6)[1])
    with pytest.raises(KeyboardInterrupt):
        rows.generate(9, Draws(seed=1))
    monkeypatch.undo()
    done = len(rows.new_tokens(0))
    assert 0 < done < 9
    rows.generate(9 - done, Draws(seed=1))
    assert same_samples(rows.samples(), whole)


def test_rows_behind_their_states_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption while what was drawn is handed to rows."""
    model = build("qwen3_5").eval()
    rows = TreeSampler(model, 500).start(pt.PrefixForest.from_sequences([[3, 4, 5], [6, 7]]))
    hook = _interrupt(2)
    original = GrowingForest.extend
    monkeypatch.setattr(GrowingForest, "extend", lambda *args: (hook(), original(*args))[1])
    with pytest.raises(KeyboardInterrupt):
        rows.generate(5, Draws(seed=1))
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="while recurrent layers read tokens"):
        rows.generate(1)


def test_layers_that_are_replaced_after_the_prefill_are_noticed() -> None:
    model = build("qwen3_5").eval()
    rows = TreeSampler(model, 500).start(pt.PrefixForest.from_sequences([[3, 4, 5], [6, 7]]))
    mixer = model.model.language_model.layers[0].linear_attn
    mixer.forward = lambda hidden_states, **_: hidden_states
    with pytest.raises((pt.UnsupportedError, RuntimeError), match=r"recurrent|state|changed"):
        rows.generate(3)


def test_the_numbers_of_new_tokens_may_be_unlike() -> None:
    """One forward reads replies of unlike lengths; what branched reads them from one slot."""
    model = build("kimi_linear").eval()
    rng = np.random.default_rng(0)
    rows = TreeSampler(model, 500).start(pt.PrefixForest.from_sequences([[3, 4, 5, 6], [3, 9]]))
    rows.branch([4, 2])
    rows.append({row: rng.integers(3, 90, n).tolist() for row, n in enumerate((1, 5, 2, 7, 0, 3))})
    rows.generate(4, Draws(seed=3))
    assert worst(model, rows.samples()) < 3e-5


@pytest.mark.full
def test_compiled_layers_keep_and_go_on_from_states() -> None:
    model = build("qwen3_5").eval()

    def sample() -> Samples:
        forest = pt.PrefixForest.from_sequences([[3, 4, 5], [3, 4, 6, 7]])
        rows = TreeSampler(model, 1000).start(forest)
        rows.branch(3)
        rows.generate(3, Draws(seed=1))
        rows.append({0: [7, 8], 1: [9]})
        rows.generate(2, Draws(seed=2))
        return rows.samples()

    expected = sample()
    torch._dynamo.reset()
    pt.compile_layers(model, backend="eager")
    found = sample()
    assert same_samples(found, expected)
    for new, old in zip(found.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(new, old, atol=3e-5, rtol=0)
    torch._dynamo.reset()


def test_inference_mode_may_come_and_go() -> None:
    model = build("qwen3_5").eval()
    forest = pt.PrefixForest.from_sequences([[3, 4, 5], [3, 9]])
    found = []
    for mode in (True, False):
        with torch.inference_mode(mode):
            rows = TreeSampler(model, 500).start(forest)
        with torch.inference_mode(not mode):
            rows.append({0: [7, 8]})
            rows.branch(2)
        with torch.inference_mode(mode):
            rows.generate(3)
            found.append(rows.samples())
    assert same_samples(*found)
