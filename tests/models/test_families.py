"""Each family on the allow-list equals its own eager run, sequence by sequence: log-probabilities,
entropies and the gradient of every parameter. What "equals" is relative to: `models.Errors`."""

from __future__ import annotations

import copy
import re
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from packaging import version
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import prefixtree as pt
import prefixtree.integrations.transformers as adapter
from prefixtree.models import families, rope
from prefixtree.models.unserved import UNSERVED
from prefixtree.packing.host_mask import HostMask
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.family_configs import FAMILIES
from tests.support.family_table import ABOUT, NEWEST, PROOFS, TABLE, TOTAL, refused, states
from tests.support.full import each_once
from tests.support.hooks import put
from tests.support.hybrid_configs import HYBRIDS
from tests.support.models import (
    EVERY_TIME,
    TRANSFORMERS,
    Objective,
    Run,
    assert_same,
    attentions,
    build,
    cases,
    counted,
    enable_checkpointing,
    errors,
    let_wrong_masks_run,
    make_objective,
    mostly_full,
    ragged_sequences,
    recurrent,
    run_packed,
    run_replicated,
    text_parameters,
    tolerance,
)
from tests.support.variant_configs import (
    CANNOT_CHECKPOINT,
    PARTS,
    REFUSED_BELOW,
    VARIANTS,
)

# layers that are unlike others: positions, norms, windows, softcaps, experts, indexers, states
_QUICK = {
    *EVERY_TIME,
    *(name for name in VARIANTS if "unified" not in name),
    *("gpt2", "phi3", "granite", "modernbert-decoder", "gemma2", "gemma4", "cohere2"),
    *("deepseek_v4", "minimax_m3_vl_text", "falcon_h1", "lfm3"),
}
_CHECKPOINTING = {"none": None, "reentrant": True, "non-reentrant": False}
_RECOMPUTED_EVERY_TIME = {
    "none": _QUICK,
    "reentrant": {"qwen3", "deepseek_v3", "qwen3_5", "gemma4_text/shared keys"},
    "non-reentrant": {"gemma3_text", "gpt_oss", "kimi_linear", "lfm2"},
}
_PROVEN = cases([*FAMILIES, *VARIANTS])


@cache
def _objective() -> Objective:
    return make_objective(ragged_sequences())


@cache
def _packed() -> pt.PackedForest:
    return pt.pack(pt.PrefixForest.from_sequences(_objective().sequences))


@cache
def _reference(model_type: str) -> Run:
    return run_replicated(build(model_type, "eager"), _objective())


def test_the_forest_is_hard_enough():
    """The proofs below rest on depth, endings inside, repeats, siblings of unequal length."""
    forest = _packed().forest
    assert forest.num_levels >= 4 and int(_packed().position_ids.max()) >= 35
    ends, counts = np.unique(forest.sequence_node, return_counts=True)
    assert (counts > 1).any(), "a repeated sequence"
    inner = np.unique(forest.node_parent[forest.node_parent >= 0])
    assert np.isin(ends, inner).any(), "a sequence that ends inside the tree"
    assert (forest.node_length == 1).any() and (forest.node_parent < 0).sum() == 3
    # a first token after a branch whose predictor is not the token before it in packed order
    predictor = _packed().predictor.numpy()
    assert (predictor != np.arange(len(predictor)) - 1)[predictor >= 0].sum() >= 4


@pytest.mark.parametrize("model_type", mostly_full([*FAMILIES, *VARIANTS]))
def test_every_parameter_matters(model_type):
    """Otherwise a comparison of gradients would compare zeros: of every parameter, of every expert
    and of every sink there is a gradient that is not noise."""
    reference = _reference(model_type)
    model = build(model_type, "eager")
    assert reference.gradients.keys() == text_parameters(model).keys()
    total = sum(float(g.norm()) ** 2 for g in reference.gradients.values()) ** 0.5
    for name, gradient in reference.gradients.items():
        if name.endswith("k_proj.bias") and not _turns_keys(model, name):
            # moves all scores of a query alike, which a softmax does not see
            assert gradient.norm() < 1e-5 * total, name
            continue
        assert gradient.norm() > 1e-5 * total, name
        if "experts" in name or "sinks" in name:
            rows = gradient.flatten(1) if gradient.ndim > 1 else gradient[:, None]
            if model_type == "longcat_flash":
                # it may keep rows for the experts that do nothing, which come last
                rows = rows[: model.config.n_routed_experts]
            assert rows.any(1).all()


def _turns_keys(model: Any, name: str) -> bool:
    layers = getattr(model.config, "no_rope_layers", None)
    if layers is not None:
        return bool(layers[int(name.split(".layers.")[1].split(".")[0])])
    return model.config.model_type != "opt"


def _ways() -> list[Any]:
    """(model_type, checkpointing): families as they are, and under both kinds of checkpointing."""
    found = []
    for case in _PROVEN:
        for kind in _CHECKPOINTING:
            (name,) = case.values
            quick = name in _RECOMPUTED_EVERY_TIME[kind]
            marks = [*case.marks, *([] if quick else [pytest.mark.full])]
            found.append(pytest.param(name, kind, marks=marks))
    return found


@pytest.mark.parametrize(("model_type", "checkpointing"), _ways())
def test_equals_eager_one_by_one(model_type, checkpointing, record_property):
    """Both runs in training mode; checkpointing is seen to recompute every layer, since a
    checkpointing that is silently off would prove nothing."""
    model = build(model_type)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    use_reentrant = _CHECKPOINTING[checkpointing]
    if use_reentrant is not None:
        assert model.supports_gradient_checkpointing == (model_type not in CANNOT_CHECKPOINT)
        if model_type in CANNOT_CHECKPOINT:
            pytest.skip(f"transformers does not checkpoint {model_type}")
        enable_checkpointing(model, use_reentrant)
    # the layer's own hooks stay outside the checkpoint in newer transformers
    modules = attentions(model) + recurrent(model)
    if use_reentrant and "shared keys" in model_type:
        with pytest.raises(pt.UnsupportedError, match="reentrant checkpointing loses gradients"):
            run_packed(model, _packed(), _objective())
        sequence_logprobs(model.eval(), _packed())
        return
    assert len(modules) == _mixing_layers(model.config.get_text_config())
    with counted(modules) as forwards:
        run = run_packed(model, _packed(), _objective())
    expected = (1 if use_reentrant is None else 2) * len(modules)
    # it checkpoints recurrent layers inside of checkpointed ones
    assert forwards() == expected or (model_type == "zamba2" and forwards() > expected)
    found = assert_same(run, _reference(model_type), tolerance(model_type))
    # family_table.py reads them
    for name in ("logprob", "entropy", "gradient"):
        record_property(name, getattr(found, name))
    record_property("transformers", str(TRANSFORMERS))
    # nothing, a router's balance least of all, was carried from one batch to the next
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())


def _mixing_layers(config: Any) -> int:
    """Attentions and recurrent layers, of which a hybrid layer has one each."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return sum({"hybrid": 2, "mlp": 0, "moe": 0}.get(kind, 1) for kind in kinds)


def test_every_supported_model_type_is_proven_here():
    assert adapter.supported_model_types() == sorted([*FAMILIES, *PARTS])
    assert {name.partition("/")[0] for name in VARIANTS} <= FAMILIES.keys()
    for part, whole in PARTS.items():
        assert build(whole).config.get_text_config().model_type == part


@pytest.mark.full
def test_every_allowed_rope_type_is_proven_here():
    proven = set()
    for case in _PROVEN:
        if not case.marks:
            proven |= {
                kind for kind, _ in rope.ropes_of(build(*case.values).config.get_text_config())
            }
    # those that depend on lengths are proven in test_rope.py
    assert proven >= rope.STATIC


@pytest.mark.parametrize("model_type", mostly_full(FAMILIES))
def test_a_family_that_can_slide_does(model_type):
    """So that its windows are proven to reach the attention function, and to count depth."""
    model = build(model_type, "eager")
    config = model.config.get_text_config()
    modules = [sys.modules[type(m).__module__] for m in attentions(model)]
    slides = any(hasattr(m, "create_sliding_window_causal_mask") for m in modules)
    if not slides or model_type in _WINDOW_IN_MASK:
        return
    if getattr(config, "layer_types", None) is not None:
        assert "sliding_attention" in config.layer_types
    assert config.sliding_window < 7


# their windows are refused: they do not reach the attention function
_WINDOW_IN_MASK = ["qwen2_moe"]


@pytest.mark.parametrize("model_type", _WINDOW_IN_MASK)
def test_a_window_that_does_not_reach_the_attention_is_refused(model_type):
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    model = build(model_type, **window)
    with pytest.raises(pt.UnsupportedError, match="keeps its sliding window from the attention"):
        sequence_logprobs(model, _packed())


@pytest.mark.parametrize("model_type", cases(name for name in VARIANTS if "shared keys" in name))
@pytest.mark.parametrize("kept", [1, 3])
def test_layers_that_share_keys_generate(model_type, kept):
    """In an ordinary call they keep few queries of all keys, and no mask says which."""
    model = build(model_type, num_kv_shared_layers=2).eval()
    ids = torch.from_numpy(_objective().sequences[0])[None]
    assert ids.shape[1] > 2 * model.config.sliding_window
    with torch.no_grad():
        logits = model(ids, use_cache=True, logits_to_keep=kept).logits
        model.set_attn_implementation("eager")
        expected = model(ids, use_cache=True).logits[:, -kept:]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_the_table_is_of_these_families():
    """docs/families.md, which `make families` writes."""
    table = TABLE.read_text().partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    assert [row[1].strip(" `") for row in rows] == sorted(FAMILIES) == sorted(ABOUT)
    for row in rows:
        assert max(map(float, row[5:7])) <= tolerance(row[1].strip(" `"))


def test_the_table_says_what_each_type_with_states_does():
    """As the generator writes it where every test of the results passed; one that did not shows."""
    every = {(module, name.format(t)) for t in HYBRIDS for module, name in PROOFS.values()}
    assert states(every) in TABLE.read_text()
    module, name = PROOFS["sampler"]
    assert "| `lfm2` | yes | yes | yes | yes | no |" in states(
        every - {(module, name.format("lfm2"))}
    )


def test_every_causal_model_type_is_proven_or_refused_with_a_reason():
    """Of the installed transformers. What a type's checkpoints load as counts: gpt-sw3 is gpt2."""
    types = {CONFIG_MAPPING[name].model_type for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    known = {*adapter.supported_model_types(), *UNSERVED}
    assert types <= known
    assert not UNSERVED.keys() & set(adapter.supported_model_types())
    if version.parse(NEWEST).release == TRANSFORMERS.release[:2]:
        assert len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) == TOTAL
        # a vision model and its text part have reasons too
        assert UNSERVED.keys() <= types | set(CONFIG_MAPPING)
        assert {"gpt-sw3"} == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - types


@pytest.mark.parametrize("model_type", UNSERVED)
def test_a_type_with_a_reason_is_refused_by_it(model_type):
    config = type("Config", (), {"model_type": model_type})()
    with pytest.raises(pt.UnsupportedError, match=re.escape(f"not served: {UNSERVED[model_type]}")):
        families.check_config(config, training=False)


def test_the_table_gives_the_reasons():
    """docs/families.md ends with what the generator makes of them."""
    assert TABLE.read_text().endswith(refused())


@pytest.mark.parametrize("model_type", REFUSED_BELOW)
def test_families_are_refused_where_they_do_not_run_exactly(model_type):
    """In versions of transformers that keep from the attention function what it has to check."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {TRANSFORMERS} has no {model_type}")
    if version.parse(REFUSED_BELOW[model_type]) <= TRANSFORMERS:
        sequence_logprobs(build(model_type), _packed())
        return
    with pytest.raises(
        (ValueError, pt.UnsupportedError),
        match=r"position_ids to its attention|attention_mask|sparse_attention|indexer",
    ):
        sequence_logprobs(build(model_type), _packed())


def test_the_model_itself_returns_the_logits_of_every_sequence():
    """Without `sequence_logprobs`: what `unpack` makes of the packed logits is the eager logits."""
    model = build("qwen2")
    packed = _packed()
    with torch.no_grad():
        logits = packed.unpack(model(**packed.model_inputs()).logits[0])
        model.set_attn_implementation("eager")
        for got, tokens in zip(logits, _objective().sequences, strict=True):
            expected = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0]
            torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


# ---- the comparison must turn red ----------------------------------------------------------------
# Each feeds the very comparison above a mistake that a real project has made or could make.


def _with_mask(mask: pt.TreeMask) -> Any:
    """The packed forest, but the model is given another mask."""
    packed = copy.copy(_packed())
    inputs = {**packed.model_inputs(), "tree_mask": mask}
    packed.model_inputs = lambda: inputs
    return packed


def _causal(subtree_end: np.ndarray) -> np.ndarray:
    return np.full_like(subtree_end, len(subtree_end))


def _dropped_ancestor(subtree_end: np.ndarray) -> np.ndarray:
    """The root of the first tree is not seen by its grandchildren any more."""
    forest = _packed().forest
    child = int(np.flatnonzero(forest.node_parent == 0)[0])
    start = forest.node_start[child]
    out = subtree_end.copy()
    out[start : start + forest.node_length[child]] = start + forest.node_length[child]
    return out


def _dropped_token(subtree_end: np.ndarray) -> np.ndarray:
    """One token of the root is seen by nobody but itself; its row of the mask alone is wrong."""
    out = subtree_end.copy()
    out[4] = 5
    return out


def _swapped_siblings(subtree_end: np.ndarray) -> np.ndarray:
    """Two leaves side by side, each as long as the other is."""
    forest = _packed().forest
    is_leaf = ~np.isin(np.arange(forest.num_nodes), forest.node_parent)
    for first in range(forest.num_nodes - 1):
        a, b = int(forest.node_length[first]), int(forest.node_length[first + 1])
        siblings = forest.node_parent[first] == forest.node_parent[first + 1] >= 0
        if siblings and is_leaf[first] and is_leaf[first + 1] and a != b:
            start = int(forest.node_start[first])
            out = subtree_end.copy()
            out[start : start + b] = start + b
            out[start + b : start + b + a] = start + b + a
            return out
    raise AssertionError("the forest has no two such leaves")


_WRONG_MASKS = [_causal, _dropped_ancestor, _dropped_token, _swapped_siblings]


@pytest.mark.parametrize(
    "wrong, model_type",
    each_once(_WRONG_MASKS, ["qwen3", "mistral"]),
    ids=lambda x: getattr(x, "__name__", x).strip("_"),
)
def test_wrong_masks_turn_it_red(wrong, model_type, monkeypatch):
    let_wrong_masks_run(monkeypatch)
    put(monkeypatch, "check of positions", lambda *args: None)
    subtree_end = _packed().subtree_end.numpy()
    run = run_packed(build(model_type), _with_mask(pt.TreeMask(subtree_end)), _objective())
    assert_same(run, _reference(model_type))
    run = run_packed(build(model_type), _with_mask(pt.TreeMask(wrong(subtree_end))), _objective())
    with pytest.raises(AssertionError, match="Errors"):
        assert_same(run, _reference(model_type))
    assert errors(run, _reference(model_type)).largest > 1e-3


@pytest.mark.parametrize("wrong", _WRONG_MASKS, ids=lambda f: f.__name__.strip("_"))
def test_wrong_masks_do_not_even_pass_the_check_of_positions(wrong):
    """In real use a mask of another forest is refused: its depths are not these positions."""
    packed = _with_mask(pt.TreeMask(wrong(_packed().subtree_end.numpy())))
    with pytest.raises(ValueError, match="position_ids are not the tokens' positions"):
        sequence_logprobs(build("qwen3"), packed)


def test_a_window_in_packed_distance_turns_it_red(monkeypatch):
    let_wrong_masks_run(monkeypatch)
    put(monkeypatch, "check of positions", lambda *args: None)
    host = HostMask(_packed().subtree_end.numpy(), None)
    host.position = np.arange(len(host.position), dtype=np.int32)
    mask = pt.TreeMask.__new__(pt.TreeMask)._init(host, torch.device("cpu"), "reference", False)
    run = run_packed(build("mistral"), _with_mask(mask), _objective())
    with pytest.raises(AssertionError, match="Errors"):
        assert_same(run, _reference("mistral"))


def test_labels_rolled_by_packed_order_turn_it_red(monkeypatch):
    """The first token after a branch scored from the token before it, not from its predecessor."""
    let_wrong_masks_run(monkeypatch)
    packed = copy.copy(_packed())
    inputs = packed.model_inputs()
    packed.model_inputs = lambda: inputs
    packed.mask = packed.mask.with_options()
    host = packed.mask.host = copy.copy(packed.mask.host)
    right = host.predictor
    host.predictor = np.where(right >= 0, np.arange(len(right)) - 1, -1).astype(right.dtype)
    assert (host.predictor != right).any()
    run = run_packed(build("qwen3"), packed, _objective())
    with pytest.raises(AssertionError, match="Errors"):
        assert_same(run, _reference("qwen3"))


def test_a_branch_without_its_edge_turns_it_red():
    """The loss of the first token after a branch dropped, as others document that they do."""
    predictor = _packed().predictor.numpy()
    branch = (predictor >= 0) & (predictor != np.arange(len(predictor)) - 1)
    masks = [
        np.where(b, 0, m)
        for b, m in zip(
            _packed().unpack(torch.from_numpy(branch)), _objective().loss_masks, strict=True
        )
    ]
    assert any((m != n).any() for m, n in zip(masks, _objective().loss_masks, strict=True))
    o = _objective()
    run = run_packed(
        build("qwen3"), _packed(), Objective(o.sequences, o.temperatures, masks, o.weights)
    )
    with pytest.raises(AssertionError, match="Errors"):
        assert_same(run, _reference("qwen3"))


def test_a_gradient_of_one_copy_only_turns_it_red():
    """Each shared token's gradient from its last sequence alone instead of the sum."""
    o = _objective()
    weights = [w.clone() for w in o.weights]
    weights[4].zero_()  # sequence 4 repeats sequence 0
    run = run_packed(
        build("qwen3"), _packed(), Objective(o.sequences, o.temperatures, o.loss_masks, weights)
    )
    found = errors(run, _reference("qwen3"))
    assert found.logprob <= 1e-5 < found.gradient


@pytest.mark.parametrize("model_type", mostly_full(FAMILIES))
def test_other_positions_raise(model_type):
    """The models' own default counts packed tokens: RoPE would be wrong without a trace."""
    model = pt.prepare(build(model_type))
    inputs = _packed().model_inputs()
    del inputs["position_ids"]
    for given in ({"position_ids": torch.arange(_packed().num_tokens)[None]}, {}):
        with pytest.raises(
            (ValueError, pt.UnsupportedError),
            match=r"are not the tokens' positions|position_ids to its attention",
        ):
            model(**inputs, **given)
