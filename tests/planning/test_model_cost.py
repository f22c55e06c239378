"""The cost of a token, held to what every verified family computes and to its real parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3NextConfig

from prefixtree.errors import UnsupportedError
from prefixtree.images.encodings import blank_image
from prefixtree.images.vision import encoder_of, grid_keyword_of
from prefixtree.packing.visible import pairs_per_run, visible_keys, visible_pairs
from prefixtree.planning.costs import CostModel
from prefixtree.planning.micro_batches import plan_micro_batches
from prefixtree.planning.model_cost import model_cost, state_cost, state_heads
from tests.support import image_cases
from tests.support.family_configs import FAMILIES
from tests.support.full import mostly
from tests.support.hybrid_configs import HYBRIDS
from tests.support.models import EVERY_TIME, build, cases, recurrent
from tests.support.variant_configs import VARIANTS

TOKENS = 20
# AltUp mixes hidden states by matrices that it makes on the way: 3.5 % where these are 32 wide.
# DeepSeek V4's queries attend to compressed keys too, and its indexer's pairs are few: 12 % here.
# LongCat routes tokens to experts that compute nothing, here 13 % of the FLOPs that are derived.
NOT_OF_WEIGHTS = {"deepseek_v4": 0.15, "gemma3n_text": 0.05, "longcat_flash": 0.15}


def _flops_of_states(model: Any) -> int:
    """The FLOPs of torch's own recurrences: of whole chunks, with Mamba-2's states of chunks
    summed pair by pair, and of convolutions beyond the last token."""
    config = model.config.get_text_config()
    chunk = getattr(config, "chunk_size", None) or getattr(config, "mamba_chunk_size", None) or 64
    chunks = -(-TOKENS // chunk)
    # what is inside is counted once per layer
    total = 2 * chunks * chunk * state_cost(model, chunk)
    for module in recurrent(model):
        convolution = next(c for c in module.children() if isinstance(c, torch.nn.Conv1d))
        total += 2 * (convolution.kernel_size[0] - 1) * convolution.weight.numel()
        if (size := getattr(module, "ssm_state_size", None)) is not None:
            total += 2 * (chunks + 1) ** 2 * module.num_heads * module.head_dim * size
    return total


def counted_flops(model: Any) -> int:
    """FLOPs of the matrix products of one forward, as torch counts them."""
    # one product per expert and token group, which torch counts
    model.set_experts_implementation("eager")
    ids = torch.randint(3, 90, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(input_ids=ids, use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("family", mostly(cases([*FAMILIES, *VARIANTS]), EVERY_TIME))
def test_the_cost_of_a_token_is_what_the_model_computes(family: str) -> None:
    model = build(family, "eager")
    cost = model_cost(model.config)
    whole = model_cost(model)
    assert whole.parameters == sum(p.numel() for p in model.parameters())
    # eager attention computes every pair, visible or not
    linear = 2 * TOKENS * (cost.token_weights + cost.lm_head_weights)
    attention = 2 * TOKENS**2 * sum(x.per_pair + x.index_per_pair for x in cost.layers)
    linear += _flops_of_states(model)
    expected = counted_flops(model)
    print(f"{family}: {cost.parameters} parameters, derived / counted {linear + attention}")
    limit = NOT_OF_WEIGHTS.get(family.partition("/")[0], 1e-3)
    assert linear + attention == pytest.approx(expected, rel=limit)
    # of the model itself, with weights, the same; some configs build a language model alone
    assert whole == replace(cost, parameters=whole.parameters)
    # and the planner's coefficients are made of it
    planned = CostModel.from_config(model.config, scored_share=0.0)
    assert planned.linear == 6 * (cost.token_weights + cost.token_states)
    assert (cost.token_states > 0) == (family in HYBRIDS and "lfm" not in family)
    pairs = sum(7 * x.per_pair + 2 * x.index_per_pair for x in cost.layers)
    assert planned.attention + planned.windowed == pairs


def test_layers_differ() -> None:
    laguna = model_cost(build("laguna", "eager").config)
    # heads by layer, windows by layer, a dense first layer
    assert [layer.per_pair for layer in laguna.layers] == [4 * 32, 4 * 32, 2 * 32]
    assert laguna.windows == (6, None, 6)
    assert len({layer.weights for layer in laguna.layers}) == 3
    # D of the full layers is twice that of the others
    gemma = model_cost(build("gemma4_text", "eager").config)
    for layer in gemma.layers:
        assert layer.per_pair == 4 * (2 * 8 if layer.window else 2 * 16)


def test_linear_attention_has_weights_and_no_pairs() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    cost = model_cost(Qwen3NextConfig(**sizes, **heads, **experts))
    kinds = [layer.kind for layer in cost.layers]
    assert kinds == ["linear_attention"] * 3 + ["full_attention"]
    assert [layer.per_pair for layer in cost.layers] == [0, 0, 0, 4 * 16]
    assert all(layer.weights > 0 for layer in cost.layers)


class _Taps(torch.nn.Module):
    """Weights of a convolution that is no Conv1d."""

    def __init__(self, convolution: torch.nn.Conv1d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "falcon_h1"])
def test_a_recurrence_is_known_by_the_functions_that_it_calls(family: str) -> None:
    model = build(family, "eager")
    expected, heads = model_cost(model), state_heads(model)
    assert heads
    for mixer in recurrent(model):
        mixer.conv1d = _Taps(mixer.conv1d)
    cost = model_cost(model)
    for name in ("state", "state_numbers"):
        assert [getattr(x, name) for x in cost.layers] == [
            getattr(x, name) for x in expected.layers
        ]
    assert state_heads(model) == heads


@pytest.mark.parametrize(
    "family, size", [("qwen3_5", "head_k_dim"), ("nemotron_h", "head_dim"), ("zamba2", "head_dim")]
)
def test_a_state_that_would_count_as_nothing_is_refused(family: str, size: str) -> None:
    model = build(family, "eager")
    delattr(recurrent(model)[-1], size)
    with pytest.raises(UnsupportedError, match="has no state whose heads and sizes are known"):
        model_cost(model)
    # whose layers hold a convolution alone, or are another model's
    assert model_cost(build("lfm2", "eager")).token_states == 0
    model.config.get_text_config().model_type = "of another"
    assert model_cost(model).token_states > 0


def test_a_config_that_no_language_model_is_built_from() -> None:
    config = Qwen3Config().__class__.__mro__[1]()
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        setattr(config, name, 8)
    with pytest.raises(ValueError, match=r"give CostModel\(linear=..., attention=...\) instead"):
        CostModel.from_config(config)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_pairs_of_runs(window: int | None) -> None:
    position, length = np.array([0, 3, 7]), np.array([3, 4, 1])
    expected = [
        sum(min(p + 1, window or p + 1) for p in range(start, start + n))
        for start, n in zip(position, length, strict=True)
    ]
    assert pairs_per_run(position, length, window).tolist() == expected
    assert visible_pairs(position, length, window) == sum(expected)
    assert visible_keys(np.arange(3), window).sum() == expected[0]


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "gemma4", "glm4v"])
def test_the_cost_of_an_image_is_what_its_encoder_computes(model_type: str) -> None:
    """But for attention; a placeholder stands for 2 x 2 patches."""
    model = image_cases.build(model_type, "sdpa")
    side = 2
    pixels, grids = blank_image(model.config, side)
    with FlopCounterMode(display=False) as counter:
        encoder_of(model)(pixels, **{grid_keyword_of(model.config): grids})
    of_attention = ("_scaled_dot_product", "bmm")
    counts = counter.get_flop_counts()["Global"]
    linear = sum(n for name, n in counts.items() if not any(x in str(name) for x in of_attention))
    costs = CostModel.from_config(model.config)
    print(f"{model_type}: derived / counted {costs.image / 3 * side**2} / {linear}")
    assert costs.image == 3 * linear / side**2
    again = CostModel.from_config(model.config, gradient_checkpointing=True)
    assert again.image * 3 == costs.image * 4
    images = image_cases.images_of(model, image_cases.batch(model_type))
    assert costs.first_image == images.first_id
    text = CostModel.from_config(build("qwen3", "eager").config)
    assert (text.image, text.first_image) == (0, None)


def test_plans_count_images() -> None:
    """Of two ranks each gets an image; by the tokens alone one would get both, and the other all
    the text."""
    rows = [np.append(1, np.full(39, 100)), np.append(2, np.full(39, 101)), np.arange(3, 83)]
    held, total = {}, {}
    for cost in (0.0, 1e12):
        costs = CostModel(attention=0.0, image=cost, first_image=100)
        plan = plan_micro_batches(rows, 1000, num_ranks=2, cost_model=costs)
        held[cost] = sorted(plan[rank][0].sequence_indices.tolist() for rank in (0, 1))
        total[cost] = sum(plan[rank][0].cost for rank in (0, 1))
    assert held[0.0] == [[0, 1], [2]]
    assert all(len({0, 1} & set(sequences)) == 1 for sequences in held[1e12])
    assert total[1e12] - total[0.0] == pytest.approx(78 * 1e12, rel=1e-4)
