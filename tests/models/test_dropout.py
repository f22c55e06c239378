"""`share_dropout`: LoRA's dropout with one mask per distinct token, in every way to run a forest,
beside copies that draw the same masks."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import prefixtree as pt
from prefixtree.kernels.splitmix import path_keys
from prefixtree.models import dropout
from prefixtree.models.families import KEYS
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.dropout_ranks import SEED, TARGETS, shared
from tests.support.full import mostly
from tests.support.models import (
    Run,
    assert_same,
    build,
    enable_checkpointing,
    pack_sequences,
    ragged_objective,
    ragged_packed,
    reward_model,
    run_packed,
    run_replicated,
    same_bits,
    with_random_lora,
)
from tests.support.spawn import run_ranks
from tests.support.step_ranks import LIGHT

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    # Dynamo asks hidden states for it
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def keys_of(sequences: Any, seed: int) -> torch.Tensor:
    """Of the packed tokens of sequences."""
    packed = sequences if isinstance(sequences, pt.PackedForest) else pack_sequences(sequences)
    of_tokens = packed.input_ids, packed.position_ids, packed.subtree_end
    return path_keys(*of_tokens, seed)


def with_own_keys(model: nn.Module, seed: int = SEED) -> nn.Module:
    """A model of ordinary rows: each copy of a token draws the mask of its path."""

    def give(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        keys = keys_of([*kwargs["input_ids"].numpy()], seed)
        return args, {**kwargs, KEYS: keys}

    model.register_forward_pre_hook(give, with_kwargs=True)
    return model


@cache
def _reference() -> Run:
    return run_replicated(with_own_keys(shared("eager")), ragged_objective())


@cache
def _packed_run() -> Run:
    return run_packed(shared(), ragged_packed(), ragged_objective())


def test_keys_are_of_paths():
    sequences = [[5, 6, 7, 8], [5, 6, 9], [6, 5, 7], [5, 6, 7, 8, 8], [5]]
    packed = pack_sequences(sequences)
    keys = keys_of(packed, 3)
    assert len(set(keys.tolist())) == packed.num_tokens == 9
    for row, tokens in zip(packed.unpack(keys), sequences, strict=True):
        assert torch.equal(row, keys_of([tokens], 3))
    assert not (keys == keys_of(packed, 4)).any()
    padded = pt.pack(packed.forest, 16)
    assert torch.equal(keys_of(padded, 3)[:9], keys)
    assert keys_of(packed, 2**80 - 1).shape == (9,)


@pytest.mark.parametrize("p", [0.05, 0.5, 1.0])
def test_masks_are_as_those_of_a_dropout(p):
    """Every feature, token and module drops a share p, and none knows of another."""
    keys = keys_of([np.arange(2000)], 0)
    layer = dropout.SharedDropout(p, 0, keys)
    other = dropout.SharedDropout(p, 1, keys)
    with pytest.raises(pt.UnsupportedError, match="computed again apart from it"):
        layer(torch.ones(1, 2000, 30))
    dropout.now.in_layer, dropout.now.keys = True, keys
    try:
        first, second = (m(torch.ones(1, 2000, 30)) for m in (layer, other))
    finally:
        del dropout.now.in_layer, dropout.now.keys
        dropout.now.used = ()
    if p == 1:
        assert not first.any()
        return
    assert first.unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=1e-4)
    drops = torch.stack([first, second]).eq(0).double()
    assert abs(float(drops.mean()) - p) < 5 * (p * (1 - p) / drops.numel()) ** 0.5
    for axis, count in ((2, 2000), (3, 30)):
        assert float((drops.mean(axis) - p).abs().max()) < 7 * (p * (1 - p) / count) ** 0.5
    together = torch.corrcoef(drops.flatten(2).flatten(0, 1))[0, 1]
    assert abs(float(together)) < 5 / 60_000**0.5
    neighbours = torch.corrcoef(first[0].eq(0).double().T).fill_diagonal_(0)
    assert float(neighbours.abs().max()) < 6 / 2000**0.5


def test_dropout_matters():
    """Other masks are another function: what follows compares more than rounding."""
    other = run_packed(shared(seed=8), ragged_packed(), ragged_objective())
    with pytest.raises(AssertionError):
        assert_same(other, _reference())
    still = run_packed(shared().eval(), ragged_packed(), ragged_objective())
    assert_same(still, run_packed(shared(lora_dropout=0.0), ragged_packed(), ragged_objective()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        *({"recompute": mode} for mode in ("all", "all_but_attention", "nothing", "auto")),
        {"max_step_tokens": 60},
        {"max_step_tokens": 60, "recompute": "all"},
    ],
    ids=str,
)
def test_equals_copies_that_draw_the_same_masks(options):
    run = run_packed(shared(), ragged_packed(), ragged_objective(), **options)
    assert_same(run, _reference())
    assert all(map(torch.equal, run.logprobs, _packed_run().logprobs))


@pytest.mark.parametrize("use_reentrant", mostly([False, True], [False]))
def test_checkpointing_of_transformers(use_reentrant):
    model = shared()
    enable_checkpointing(model, use_reentrant)
    model.enable_input_require_grads()
    assert same_bits(run_packed(model, ragged_packed(), ragged_objective()), _packed_run())


@pytest.mark.full
@pytest.mark.parametrize("recompute", [None, "all_but_attention"])
def test_compiled_layers(recompute):
    model = shared()
    pt.compile_layers(model, backend="eager")
    for seed in (SEED + 1, SEED):
        pt.share_dropout(model, seed)
        run = run_packed(model, ragged_packed(), ragged_objective(), recompute=recompute)
    assert_same(run, _reference())


@pytest.mark.parametrize(
    "more", mostly([{"use_dora": True}, {"use_rslora": True}, "ADALORA"], [{"use_dora": True}])
)
def test_other_methods(more):
    def model_of(implementation: str) -> Any:
        if more != "ADALORA":
            return shared(implementation, **more)
        torch.manual_seed(0)
        config = peft.AdaLoraConfig(
            init_r=4, total_step=10, target_modules=list(TARGETS), lora_dropout=0.3
        )
        model = peft.get_peft_model(build("qwen3", implementation), config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(torch.randn(p.shape) * 0.1 * ("lora_" in name))
        return pt.share_dropout(model.train(), SEED)

    reference = run_replicated(with_own_keys(model_of("eager")), ragged_objective())
    run = run_packed(model_of("prefixtree"), ragged_packed(), ragged_objective(), recompute="all")
    assert_same(run, reference)


def _losses(model: Any, **options: Any) -> torch.Tensor:
    scores = sequence_logprobs(model, ragged_packed(), **options).logprobs
    return sum(((i + 1) * row.square()).sum() for i, row in enumerate(scores))


@pytest.mark.parametrize("options", [{"recompute": "all"}, {"max_step_tokens": 60}], ids=str)
def test_the_gradient_is_the_slope_of_one_seed(options):
    """torch's dropout under this recomputation gave 74.1 where the slope was 9.1."""
    model = shared().double()
    _losses(model, **options).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(0)
    ways = [torch.randn_like(p) for p in trained]
    slope = sum(float((p.grad * way).sum()) for p, way in zip(trained, ways, strict=True))
    ends = []
    for step in (1e-4, -2e-4):
        with torch.no_grad():
            for p, way in zip(trained, ways, strict=True):
                p.add_(way, alpha=step)
            ends.append(float(_losses(model)))
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-3)


def test_micro_batches_and_a_second_forward_draw_the_same_masks():
    """Log p of an unmoved policy has the ratio 1, whatever it is packed with: in float64, as
    products of other shapes round differently."""
    model, sequences = shared().double(), ragged_objective().sequences
    with torch.no_grad():
        whole = sequence_logprobs(model, ragged_packed()).logprobs
        for part in ([0, 3, 5], [4, 1, 2, 7]):
            packed = pack_sequences([sequences[i] for i in part])
            for i, row in zip(part, sequence_logprobs(model, packed).logprobs, strict=True):
                assert torch.equal(row, whole[i])
        pt.share_dropout(model, SEED + 1)
        other = sequence_logprobs(model, ragged_packed()).logprobs
        assert min(float((a - b).abs().max()) for a, b in zip(whole, other, strict=True)) > 0.01


@pytest.mark.parametrize("again", mostly([None, "again"], ["again"]))
def test_kept_trunks(again):
    """Gradients of micro-batches that keep a trunk are those of one forest."""
    model = shared().double()
    sequences, more = ragged_objective().sequences, {"trunks": True, "import_cost": LIGHT}
    plan = pt.plan_micro_batches(sequences, 24, **more)
    found: dict[int, torch.Tensor] = {}
    with pt.kept_trunks(model, plan[0], recompute_trunks=again) as scored:
        assert scored.packed.num_tokens == ragged_packed().num_tokens
        for batch, scores in scored:
            rows = zip(batch.sequence_indices.tolist(), scores.logprobs, strict=True)
            loss = torch.zeros(())
            for i, row in rows:
                found[i] = row.detach()
                loss = loss + (i + 1) * row.square().sum()
            loss.backward()
    kept = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    rows = sequence_logprobs(model, ragged_packed()).logprobs
    sum(((i + 1) * row.square()).sum() for i, row in enumerate(rows)).backward()
    for i, row in enumerate(rows):
        assert torch.equal(found[i], row.detach())
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert float((kept[name] - p.grad).norm() / p.grad.norm()) < 1e-5, name


def test_values():
    """Of a reward model, in steps too, beside each sequence alone."""

    def reward(implementation: str) -> Any:
        model = with_random_lora(reward_model("qwen3", implementation), *TARGETS, lora_dropout=0.3)
        return pt.share_dropout(model.train(), SEED)

    ours, stock = reward("prefixtree"), with_own_keys(reward("eager"))
    sequences = ragged_objective().sequences
    values = pt.sequence_values(ours, ragged_packed(), recompute="all")
    in_steps = pt.sequence_values(ours, ragged_packed(), max_step_tokens=60)
    for tokens, row, again in zip(sequences, values, in_steps, strict=True):
        alone = stock(input_ids=torch.from_numpy(tokens)[None]).logits[0]
        torch.testing.assert_close(row[-1], alone, atol=1e-5, rtol=1e-5)
        assert torch.equal(row, again)


def test_copies_and_pickles_keep_their_masks():
    expected = _packed_run()
    for model in (copy.deepcopy(shared()), pickle.loads(pickle.dumps(shared()))):
        assert same_bits(run_packed(model, ragged_packed(), ragged_objective()), expected)
    assert not any("salt" in name for name in shared().state_dict())


def test_a_model_without_adapters_runs_as_before():
    model = pt.share_dropout(build("qwen3"), 0)
    run = run_packed(model, ragged_packed(), ragged_objective())
    assert same_bits(run, run_packed(build("qwen3"), ragged_packed(), ragged_objective()))


def test_ordinary_batches_get_torchs_dropout():
    model = shared("eager")
    ids = torch.from_numpy(ragged_objective().sequences[0])[None]
    first, second = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    assert not torch.allclose(first, second)
    torch.manual_seed(0)
    first = model(input_ids=ids, use_cache=False).logits
    plain = with_random_lora(build("qwen3", "eager"), *TARGETS, lora_dropout=0.3).train()
    torch.manual_seed(0)
    assert torch.equal(first, plain(input_ids=ids, use_cache=False).logits)


def test_a_later_adapter_is_refused_until_it_is_shared():
    model = shared()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    model.add_adapter("later", config)
    with pytest.raises(pt.UnsupportedError, match=r"prefixtree\.share_dropout\(model, seed\)"):
        sequence_logprobs(model, ragged_packed())
    pt.share_dropout(model, SEED)
    model.set_adapter("default")
    assert same_bits(run_packed(model, ragged_packed(), ragged_objective()), _packed_run())


# ---- refused -------------------------------------------------------------------------------------


def test_what_stays_refused():
    bare = shared()
    with pytest.raises(pt.UnsupportedError, match="a bare call of it over a forest does not have"):
        bare(**ragged_packed().model_inputs())
    sampler, forest = pt.TreeSampler(bare.eval(), 99), pt.PrefixForest.from_sequences([[5, 6, 7]])
    rows = sampler.start(forest)
    bare.train()
    for sample in (lambda: rows.generate(1), lambda: sampler.start(forest)):
        with pytest.raises(pt.UnsupportedError, match="shared dropout is not verified in sampling"):
            sample()
    for targets, name in (("lm_head", "lm_head"), ("embed_tokens", "embed_tokens")):
        model = with_random_lora(build("qwen3"), "q_proj", targets, lora_dropout=0.1).train()
        with pytest.raises(pt.UnsupportedError, match=rf"{name}\.lora_dropout.* an active dropout"):
            sequence_logprobs(pt.share_dropout(model, 0), ragged_packed())
    attention = shared()
    attention.config.attention_dropout = 0.1
    with pytest.raises(pt.UnsupportedError, match=r"attention_dropout is 0\.1"):
        sequence_logprobs(attention, ragged_packed())
    twice = with_random_lora(build("gemma3n_text"), "modality_router", lora_dropout=0.1).train()
    with pytest.raises(pt.UnsupportedError, match="or a second time: its masks are not verified"):
        sequence_logprobs(pt.share_dropout(twice, 0), ragged_packed())


def test_a_part_of_a_layer_that_is_checkpointed_is_refused():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = shared()
    for layer in model.base_model.model.model.layers:
        layer.mlp = checkpoint_wrapper(layer.mlp)
    loss = _losses(model)
    with pytest.raises(pt.UnsupportedError, match="checkpoint whole layers, as recompute= does"):
        loss.backward()


@pytest.mark.parametrize("seed", [1.5, "1", None])
def test_seeds_that_are_none(seed):
    with pytest.raises(TypeError, match="seed must be an integer"):
        pt.share_dropout(shared(), seed)


# ---- two ranks -----------------------------------------------------------------------------------


def test_a_group(tmp_path):
    """Two ranks divide the forest, and their steps; other seeds on each are refused."""
    for found in run_ranks("tests.support.dropout_ranks", tmp_path):
        for name, run in found["runs"].items():
            assert isinstance(run, Run), (name, run)
            assert_same(run, _reference())
        assert "the seed of share_dropout" in found["refused"]
