"""`whole_copy` on one process: what it computes, when it has memory, and what is refused. On ranks:
tests/integrations/trl/test_distributed.py."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import prefixtree as pt
from prefixtree.sampling import Draws, TreeSampler
from prefixtree.sampling import whole_copy as room
from prefixtree.sampling.whole_copy import whole_copy
from tests.support.models import build, ragged_sequences

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def scores(model: nn.Module) -> torch.Tensor:
    packed = pt.pack(pt.PrefixForest.from_sequences(ragged_sequences()))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return torch.cat(pt.sequence_logprobs(model, packed).logprobs)


def held(parts: Any) -> set[int]:
    return {id(part) for part in parts}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "qwen3_moe", "qwen3_next"])
def test_it_computes_what_the_model_does(model_type: str, tied: bool) -> None:
    model = build(model_type, tie_word_embeddings=tied)
    with whole_copy(model) as copied:
        assert type(copied) is type(model) and model.training
        assert not any(m.training for m in copied.modules())
        assert not any(p.requires_grad for p in copied.parameters())
        assert (copied.lm_head.weight is copied.model.embed_tokens.weight) == tied
        for parts in (nn.Module.modules, nn.Module.parameters, nn.Module.buffers):
            ours, theirs = held(parts(copied)), held(parts(model))
            assert len(ours) == len(theirs) and not ours & theirs
        model.eval()
        assert torch.equal(scores(copied), scores(model))


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_adapters(settings: dict[str, Any]) -> None:
    """As they are now: another one, or none."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], **settings)
    model = peft.get_peft_model(build("qwen3"), config).eval()
    model.add_adapter("second", config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    found = []
    for name in ("default", "second"):
        model.set_adapter(name)
        with whole_copy(model) as copied:
            found.append(scores(copied))
        assert torch.equal(found[-1], scores(model))
    with model.disable_adapter(), whole_copy(model) as copied:
        found.append(scores(copied))
    one, other, none = found
    assert min(float((a - b).abs().max()) for a, b in ((one, other), (one, none))) > 1e-2


def test_numbers_are_those_of_now_and_only_within() -> None:
    model = build("qwen3").eval()
    with whole_copy(model) as copied:
        before = scores(copied)
        kept = list(copied.parameters())
        bytes_within = [p.untyped_storage().nbytes() for p in kept]
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        # it reads nothing of the model
        assert torch.equal(scores(copied), before)
    assert min(bytes_within) > 0 and not any(p.untyped_storage().nbytes() for p in kept)
    with whole_copy(model) as copied:
        assert torch.equal(scores(copied), scores(model))
        assert not torch.equal(scores(copied), before)


def test_memory_is_free_after_an_interrupt() -> None:
    kept: list[Any] = []
    with pytest.raises(KeyboardInterrupt), whole_copy(build("qwen3")) as copied:
        kept += copied.parameters()
        raise KeyboardInterrupt
    assert kept and not any(p.untyped_storage().nbytes() for p in kept)


def test_hooks_stay_with_the_model() -> None:
    model = build("qwen3").eval()
    seen: list[Any] = []
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    model.enable_input_require_grads()
    with whole_copy(model) as copied:
        scores(copied)
        assert not seen
    scores(model)
    assert seen


@pytest.mark.full
def test_compiled_layers_are_compiled_once() -> None:
    """A copy is made for every generation: its layers find the graphs of the first."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = build("qwen3").eval()
    pt.compile_layers(model, backend=backend)
    counts = []
    for new in (3, 4):
        with whole_copy(model) as copied:
            samples = TreeSampler(copied, 200).sample([[1, 2, 3]], 2, new, Draws(seed=1))
        counts.append(len(graphs))
        assert len(samples.sequences) == 2
    assert counts[0] == counts[1] > 0


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3")
    needed = sum(p.nbytes for p in model.parameters())
    monkeypatch.setattr(room, "available_bytes", lambda device: needed - 1)
    with (
        pytest.raises(MemoryError, match=rf"takes {needed:,} bytes .* {needed - 1:,} free: .*vLLM"),
        whole_copy(model),
    ):
        pass
    monkeypatch.setattr(room, "available_bytes", lambda device: needed)
    with whole_copy(model):
        pass


def test_forwards_of_instances() -> None:
    """Wrappers of known packages call the class's; of others nobody knows."""
    model = build("qwen3").eval()
    expected = scores(model)
    norm = model.model.norm
    norm.forward = MethodType(torch.no_grad()(type(norm).forward), norm)
    with whole_copy(model) as copied:
        assert torch.equal(scores(copied), expected)
    norm.forward = lambda x: x
    with (
        pytest.raises(pt.UnsupportedError, match="Norm has a forward of its own"),
        whole_copy(model),
    ):
        pass


def test_quantised_weights() -> None:
    model = build("qwen3")
    weight = model.model.layers[0].mlp.up_proj
    weight.weight = nn.Parameter(weight.weight.data.to(torch.int8), requires_grad=False)
    with pytest.raises(pt.UnsupportedError, match="quantised"), whole_copy(model):
        pass
