"""Families whose indexer chooses keys: exact in float64 and with ties, red where the selection or a
gradient is lost, lean, refused where not verified."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import prefixtree as pt
from prefixtree.kernels import best_keys, indexer_kernels
from prefixtree.models import attention
from prefixtree.models.along_tree import AlongTree
from prefixtree.sampling import TreeSampler
from prefixtree.scoring.logprobs import sequence_logprobs
from prefixtree.sparse import compressed, indexers, masks, paths
from tests.conftest import Poison
from tests.support.family_configs import INDEXED
from tests.support.float64 import Float64
from tests.support.full import each_once, mostly
from tests.support.hooks import inner, limit, wrap
from tests.support.hybrid_cases import in_float64, logprobs_of
from tests.support.models import (
    Run,
    adapted,
    assert_same,
    build,
    cases,
    enable_checkpointing,
    errors,
    gradients,
    make_objective,
    mostly_full,
    pack_sequences,
    ragged_objective,
    ragged_packed,
    ragged_sequences,
    run_packed,
    run_replicated,
    same_bits,
    text_parameters,
    tolerance,
)
from tests.support.ties import LowestFirst

BLOCKS, COMPRESSED = "minimax_m3_vl_text", "deepseek_v4"
FEW = ["deepseek_v32", "glm_moe_dsa", BLOCKS, COMPRESSED]
# of keys and of blocks; compressed keys have red checks of their own
FEWER = ["deepseek_v32", BLOCKS]
# ReLUs of 2 heads leave scores of exactly 0; of blocks, those that a query has to see tie
TIES = {"index_n_heads": 2}, {"index_local_blocks": 4}


def _alone(model: Any, sequences: Any, weights: Any) -> tuple[list[torch.Tensor], Any]:
    rows = []
    for tokens, w in zip(sequences, weights, strict=True):
        ids = torch.from_numpy(tokens)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        rows.append(logprobs_of(logits, ids[1:]))
        (rows[-1] * w).sum().backward()
    return rows, gradients(model)


def _packed(model: Any, sequences: Any, weights: Any) -> tuple[list[torch.Tensor], Any]:
    packed = pack_sequences(sequences)
    logits = packed.unpack(pt.prepare(model)(**packed.model_inputs()).logits[0])
    rows = [
        logprobs_of(x[:-1], torch.from_numpy(tokens)[1:])
        for x, tokens in zip(logits, sequences, strict=True)
    ]
    sum((row * w).sum() for row, w in zip(rows, weights, strict=True)).backward()
    return rows, gradients(model)


def _worst(found: Any, expected: Any) -> tuple[float, float]:
    (rows, grads), (want, want_grads) = found, expected
    assert grads.keys() == want_grads.keys()
    total = sum(float(g.norm()) ** 2 for g in want_grads.values()) ** 0.5
    logp = max(float((a - b).detach().abs().max()) for a, b in zip(rows, want, strict=True))
    return logp, max(
        float((grads[n] - g).norm() / max(g.norm(), 1e-3 * total)) for n, g in want_grads.items()
    )


@pytest.mark.parametrize("family, ties", each_once(mostly(cases(INDEXED), FEW), [False, True]))
def test_float64_is_exact(family: str, ties: bool) -> None:
    """Both sides take the lowest positions of those that tie."""
    changes: dict[str, Any] = TIES[family == BLOCKS] if ties else {}
    rng = np.random.default_rng(0)
    sequences = ragged_objective().sequences
    weights = [torch.from_numpy(rng.standard_normal(len(s) - 1)) for s in sequences]
    with Float64(), LowestFirst():
        expected = _alone(in_float64(family, "eager", **changes), sequences, weights)
        found = _packed(in_float64(family, **changes), sequences, weights)
    logp, gradient = _worst(found, expected)
    print(f"{family}, {changes}: float64 log p {logp:.1e}, gradient {gradient:.1e}")
    assert logp < 1e-11 and gradient < 1e-10


@pytest.mark.parametrize("family", mostly(cases(["axk2", BLOCKS]), ["axk2"]))
def test_without_the_rule_of_ties_it_turns_red(family: str) -> None:
    sequences = ragged_objective().sequences
    weights = [torch.ones(len(s) - 1, dtype=torch.float64) for s in sequences]
    changes: dict[str, Any] = TIES[family == BLOCKS]
    with Float64():
        expected = _alone(in_float64(family, "eager", **changes), sequences, weights)
        found = _packed(in_float64(family, **changes), sequences, weights)
    assert _worst(found, expected)[0] > 1e-2, "scores that tie: torch takes others than the lowest"


# ---- the comparison must turn red ----------------------------------------------------------------


@cache
def _alone_in_eager(family: str) -> Run:
    return run_replicated(build(family, "eager"), ragged_objective())


@cache
def _as_it_is(family: str) -> Run:
    return run_packed(build(family), ragged_packed(), ragged_objective())


def _errors(family: str) -> Any:
    run = run_packed(build(family), ragged_packed(), ragged_objective())
    return errors(run, _alone_in_eager(family))


def _every_earlier_token(path: Any, keys: torch.Tensor) -> torch.Tensor:
    """The keys of the tokens just before in packed order, whatever path they are of."""
    start, above = path.rows.start, len(_of_path(path, keys)) - len(keys)
    return torch.cat([path._keys[max(0, start - above) : start], keys])


_of_path = paths.QueryPath.of_path


@pytest.mark.parametrize("family", mostly(cases(FEW), FEWER))
def test_keys_by_packed_order_turn_it_red(family: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(paths.QueryPath, "of_path", _every_earlier_token)
    assert _errors(family).logprob > 1e-2


@pytest.mark.parametrize("family", cases(FEW))
def test_no_selection_turns_it_red(family: str, monkeypatch: Any) -> None:
    for module in (best_keys, indexers, compressed):
        monkeypatch.setattr(module, "best_keys", lambda scores, *_: torch.ones_like(scores).bool())
    assert _errors(family).logprob > 1e-2


@pytest.mark.parametrize("family", mostly(cases(FEW), ["deepseek_v32", COMPRESSED]))
def test_ancestors_keys_without_gradient_turn_it_red(family: str, monkeypatch: Any) -> None:
    """Log-probabilities do not tell: they stay exact."""
    inner, kinds = attention.tree_attention, set()

    def detached(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> torch.Tensor:
        if "chosen" in options:
            kinds.add(options["chosen"].dtype)
            k = torch.cat([k[:9].detach(), k[9:]])
        return inner(q, k, v, mask, **options)

    assert errors(_as_it_is(family), _alone_in_eager(family)).largest < 1e-5
    for module in (attention, masks):
        monkeypatch.setattr(module, "tree_attention", detached)
    found = _errors(family)
    assert kinds == {torch.int32}
    assert found.logprob < 1e-5 and found.gradient > 1e-2


def _in_packed_order(windows_of: Any, mask: Any, size: int) -> Any:
    """Windows of neighbours in packed order."""
    windows = windows_of(mask, size)
    tokens = windows.last[:, None] + torch.arange(1 - size, 1)
    before = torch.where(windows.before < 0, -1, tokens - size)
    return replace(windows, tokens=tokens.clamp_min(0), before=before)


def _counted(windows_of: Any, mask: Any, size: int) -> Any:
    """Positions by the number of entries."""
    windows = windows_of(mask, size)
    return replace(windows, start=size * torch.arange(len(windows.last)))


def _without_overlap(entries: Any, module: Any, *args: Any) -> torch.Tensor:
    return entries(module, *args[:-1], False)


def _without_gradient(entries: Any, module: Any, *args: Any) -> torch.Tensor:
    return entries(module, *args).detach()


@pytest.mark.parametrize("wrong", [_in_packed_order, _counted])
def test_wrong_windows_turn_it_red(wrong: Any, monkeypatch: Any) -> None:
    wrap(monkeypatch, "windows of compressed keys", wrong)
    assert _errors(COMPRESSED).logprob > 1e-2


def test_windows_without_the_one_before_turn_it_red(monkeypatch: Any) -> None:
    wrap(monkeypatch, "entries of compressed keys", _without_overlap)
    assert _errors(COMPRESSED).logprob > 1e-2


def test_entries_without_gradient_turn_it_red(monkeypatch: Any) -> None:
    """Log-probabilities do not tell."""
    expected = _alone_in_eager(COMPRESSED).gradients
    wrap(monkeypatch, "entries of compressed keys", _without_gradient)
    run = run_packed(build(COMPRESSED), ragged_packed(), ragged_objective())
    lost = {name for name in expected if ".compressor." in name}
    assert lost and expected.keys() - run.gradients.keys() == lost
    name = "model.layers.1.self_attn.q_a_proj.weight"
    assert (run.gradients[name] - expected[name]).norm() > 1e-2 * expected[name].norm()


# ---- how it runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", mostly_full(INDEXED, set(FEWER)))
def test_any_chunks_choose_the_same_keys(family: str, monkeypatch: Any) -> None:
    reference = _as_it_is(family)
    monkeypatch.setattr(paths, "CHUNK", 1)
    limit(monkeypatch, "scores of sdpa", 100)
    run = run_packed(build(family), ragged_packed(), ragged_objective())
    assert_same(run, reference, tolerance(family))


_ONE_LAYER = {"num_hidden_layers": 1, "mlp_layer_types": ("sparse",)}


# in the interpreter a token costs
SHORT = make_objective([ragged_sequences()[i] for i in (0, 1, 3, 8, 9)])


def _with_triton() -> Any:
    packed = copy.copy(pack_sequences(SHORT.sequences))
    packed.mask = packed.mask.with_options(backend="triton")
    return packed


# numpy warns in the interpreter of dead lanes, and of keys that nobody sees and that hold anything
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
# the kernels are the same for all whose indexer multiplies, takes relu and sums; in the interpreter
# a layer takes two seconds
@pytest.mark.parametrize(
    "family",
    mostly_full(["deepseek_v32", "axk2", BLOCKS, COMPRESSED], {"deepseek_v32", BLOCKS}),
)
def test_triton_scores_and_attends(family: str, poison: Poison, monkeypatch: Any) -> None:
    """In any chunks; what nobody wrote is not a number."""
    asked: list[int] = []
    inner = indexer_kernels.index_scores

    def noted(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        asked.append(len(q))
        return inner(q, *rest)

    of_tokens = family not in (BLOCKS, COMPRESSED)
    one = _ONE_LAYER if of_tokens else {}
    reference = run_packed(build(family, **one), pack_sequences(SHORT.sequences), SHORT)
    monkeypatch.setattr(indexer_kernels, "index_scores", noted)
    limit(monkeypatch, "scores of an indexer", 1)
    # of 24 heads, 4 queries at a time
    found = run_packed(build(family, **one), _with_triton(), SHORT)
    assert_same(found, reference, tolerance(family))
    if not of_tokens:
        assert not asked, "the family's own products score these"
    else:
        assert max(asked) == indexer_kernels.tile_tokens(24) < sum(asked)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_scores_of_another_order_turn_it_red(monkeypatch: Any) -> None:
    inner = indexer_kernels.index_scores
    turned = lambda *args: inner(*args).neg()  # noqa: E731
    monkeypatch.setattr(indexer_kernels, "index_scores", turned)
    with torch.no_grad():
        found = sequence_logprobs(build("deepseek_v32", **_ONE_LAYER), _with_triton()).logprobs
        packed = pack_sequences(SHORT.sequences)
        want = sequence_logprobs(build("deepseek_v32", **_ONE_LAYER), packed).logprobs
    pairs = zip(found, want, strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) > 1e-2


def test_an_indexer_that_computes_something_else_is_told(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.nn.functional, "relu", lambda x: x)
    with pytest.raises(TypeError, match="multiplies, takes relu and sums"):
        run_packed(build("deepseek_v32"), _with_triton(), SHORT)


def test_where_the_familys_own_products_run() -> None:
    """Autocast rounds them; float64 and wide heads are not triton's; and as they are asked for."""
    mask, hidden = _with_triton().mask, torch.zeros(1, 2, 3)
    kernels_for = inner("kernels of an indexer")
    assert kernels_for(mask, hidden, 128) is indexer_kernels
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels_for(mask, hidden, 128) is None
    assert kernels_for(mask, hidden.double(), 128) is None
    assert kernels_for(mask, hidden, 192) is None
    with FakeTensorMode():
        # as a trace of memory has them
        assert kernels_for(mask, torch.zeros(1, 2, 3), 128) is None
    for backend in ("auto", "sdpa"):
        assert kernels_for(mask.with_options(backend=backend), hidden, 128) is None


@pytest.mark.parametrize("family", mostly(cases(FEW), FEWER))
def test_paths_of_at_most_topk_tokens_ask_no_indexer(family: str, monkeypatch: Any) -> None:
    longest = ragged_packed().mask.host.deepest
    name = "index_topk_blocks" if family == BLOCKS else "index_topk"
    enough = {BLOCKS: -(-longest // 3), COMPRESSED: longest // 3}.get(family, longest)
    for topk in (enough, enough - 1):
        changes: dict[str, Any] = {name: topk}
        reference = run_replicated(build(family, "eager", **changes), ragged_objective())
        asked: list[int] = []
        inner = indexers.best_keys
        with monkeypatch.context() as patch:
            for module in (best_keys, indexers, compressed):
                patch.setattr(module, "best_keys", lambda *a: asked.append(0) or inner(*a))  # noqa: B023
            run = run_packed(build(family, **changes), ragged_packed(), ragged_objective())
        assert_same(run, reference, tolerance(family))
        assert bool(asked) == (topk < enough)


class _Largest(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(out) if torch.is_tensor(x)]
        self.numbers = max([self.numbers, *sizes])
        return out


def test_no_tensor_grows_with_the_square_of_the_tokens(monkeypatch: Any) -> None:
    """A bit per pair is the most there is, T x T / 8 bytes; q is larger than that here."""
    monkeypatch.setattr(paths, "CHUNK", 1 << 14)
    limit(monkeypatch, "scores of sdpa", 1 << 14)
    rng = np.random.default_rng(0)
    trunk = rng.integers(3, 97, 700)
    sequences = [np.concatenate([trunk, rng.integers(3, 97, 90)]) for _ in range(2)]
    packed = pack_sequences(sequences)
    model = build(
        "glm_moe_dsa",
        num_hidden_layers=2,
        indexer_types=["full", "shared"],
        mlp_layer_types=["dense", "dense"],
        index_topk=64,
        max_position_embeddings=2048,
    )
    with _Largest() as largest:
        scores = sequence_logprobs(model, packed, chunk_size=64)
        sum(x.sum() for x in scores.logprobs).backward()
    assert largest.numbers < packed.num_tokens**2


@pytest.mark.parametrize("mode", ["all", "all_but_attention"])
def test_what_is_recomputed_has_the_same_bits(mode: str) -> None:
    """A layer that takes the indices of one before it, too."""
    run = run_packed(build("glm_moe_dsa"), ragged_packed(), ragged_objective(), recompute=mode)
    assert same_bits(run, _as_it_is("glm_moe_dsa"))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_chooses_the_same_keys_again(use_reentrant: bool, monkeypatch: Any) -> None:
    found: dict[bytes, int] = {}
    to_bits = best_keys.to_bits

    def noted(*args: Any) -> torch.Tensor:
        bits = to_bits(*args)
        name = args[0].numpy().tobytes() + bits.numpy().tobytes()
        found[name] = found.get(name, 0) + 1
        return bits

    monkeypatch.setattr(best_keys, "to_bits", noted)
    model = build("deepseek_v32")
    enable_checkpointing(model, use_reentrant)
    run_packed(model, ragged_packed(), ragged_objective())
    assert found and not any(times % 2 for times in found.values())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("family", cases(["deepseek_v32"]))
def test_lora(family: str) -> None:
    """Its parameters on the indexer itself get no gradient, as alone."""
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b")
    run = run_packed(adapted(build(family), *targets), ragged_packed(), ragged_objective())
    reference = run_replicated(adapted(build(family, "eager"), *targets), ragged_objective())
    assert_same(run, reference, tolerance(family))
    assert run.gradients and not any("indexer" in name for name in run.gradients)


def test_index_parameters_have_no_gradient() -> None:
    """So DDP needs them frozen, or find_unused_parameters."""
    model = build("deepseek_v32")
    run = run_packed(model, ragged_packed(), ragged_objective())
    index = {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert index and not index & run.gradients.keys()
    assert run.gradients.keys() == text_parameters(model).keys()


def test_ddp_with_frozen_index_parameters(tmp_path: Any) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        reference = _as_it_is("deepseek_v32")
        model = build("deepseek_v32")
        as_it_is = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
        run_packed(as_it_is, ragged_packed(), ragged_objective())
        with pytest.raises(RuntimeError, match="find_unused_parameters"):
            run_packed(as_it_is, ragged_packed(), ragged_objective())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".indexer." not in name)
        wrapped = nn.parallel.DistributedDataParallel(model)
        for _ in range(2):
            run = run_packed(wrapped, ragged_packed(), ragged_objective())
        names = {name.removeprefix("module."): g for name, g in run.gradients.items()}
        assert all(torch.equal(g, names[name]) for name, g in reference.gradients.items())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("family", cases(name for name in INDEXED if name != COMPRESSED))
def test_ordinary_batches_run_and_generate_as_under_eager(family: str) -> None:
    """Without gradients: a row without padding, padded rows, and a cache. Blocks of keys begin at
    the padding, whose states are any: it stands behind."""
    model, other = pt.prepare(build(family)).eval(), build(family, "eager").eval()
    ids = torch.from_numpy(ragged_objective().sequences[0])[None]
    padded = ids.expand(2, -1).clone()
    seen = torch.ones_like(padded)
    padding, text = slice(5), slice(5, None)
    if family == BLOCKS:
        padding, text = slice(-5, None), slice(-5)
    seen[1, padding] = 0
    with torch.no_grad():
        for inputs in ({"input_ids": ids}, {"input_ids": padded, "attention_mask": seen}):
            got, expected = model(**inputs).logits, other(**inputs).logits
            torch.testing.assert_close(got[:, text], expected[:, text], atol=1e-5, rtol=1e-5)
        options = {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), other.generate(ids, **options))


def test_copies_and_pickles_are_prepared() -> None:
    model = pt.prepare(build("glm_moe_dsa"))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), pt.prepare(model)):
        kinds = [type(m) for m in other.modules()]
        assert kinds == [type(m) for m in model.modules()]
        # attentions, indexers, experts
        assert sum(issubclass(kind, AlongTree) for kind in kinds) == 3 + 2 + 2
        other(**ragged_packed().model_inputs())


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", cases(INDEXED))
def test_an_unprepared_model_is_refused(family: str) -> None:
    with pytest.raises(pt.UnsupportedError, match=r"call prefixtree.prepare\(model\) once"):
        build(family)(**ragged_packed().model_inputs())
    with torch.no_grad(), pytest.raises(pt.UnsupportedError, match="chooses keys with an indexer"):
        build(family).eval()(torch.arange(3, 9)[None])


def test_what_is_not_verified_is_refused() -> None:
    model = pt.prepare(build("deepseek_v32"))
    with pytest.raises(pt.UnsupportedError, match="samplers do not keep an indexer's keys"):
        TreeSampler(model.eval(), max_keys=64)
    inputs = ragged_packed().model_inputs()
    with pytest.raises(pt.UnsupportedError, match="takes the whole forest"):
        model(**{**inputs, "tree_mask": inputs["tree_mask"].for_queries([(0, 9)])})


def test_ordinary_batches_of_compressed_keys_are_refused() -> None:
    """Masks of ordinary batches are not made for entries beside the keys."""
    model, ids = pt.prepare(build(COMPRESSED)).eval(), torch.arange(3, 20)[None]
    padded = {"attention_mask": (ids > 4).long()}
    for inputs in ({}, padded, {**padded, "use_cache": True}):
        with torch.no_grad(), pytest.raises(pt.UnsupportedError, match="are not verified under"):
            model(ids, **inputs)
        with torch.no_grad(), pytest.raises(pt.UnsupportedError, match=r"prepare|not verified"):
            build(COMPRESSED).eval()(ids, **inputs)


def test_chosen_keys_of_others_are_refused() -> None:
    """Keys that a layer was told to choose, beside a tree that did not choose them."""
    model = build("qwen3")
    for name in ("indices", "block_indices"):
        with pytest.raises(pt.UnsupportedError, match="chooses keys with an indexer"):
            model(**ragged_packed().model_inputs(), **{name: torch.zeros(1, 3, 2)})


def test_layers_that_are_not_as_verified_are_refused() -> None:
    model = build("deepseek_v32")
    layer = model.model.layers[1].self_attn
    layer.indexer.forward = layer.indexer.forward
    with pytest.raises(pt.UnsupportedError, match="forward of its own"):
        pt.prepare(model)

    class Other(type(layer.indexer)):  # type: ignore[misc]
        def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
            return hidden_states

    del layer.indexer.forward
    layer.indexer.__class__ = Other
    with pytest.raises(pt.UnsupportedError, match="not the one of transformers"):
        pt.prepare(model)
    model = build("deepseek_v32")
    del model.model.layers[2].self_attn.indexer
    with pytest.raises(pt.UnsupportedError, match="2 of 3 attentions"):
        pt.prepare(model)
