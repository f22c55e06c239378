"""Run in the process of test_bridge.py."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnBackend

from prefixtree import UnsupportedError
from prefixtree.integrations.megatron import check_model, pack_batches, tree_logprobs, tree_spec
from tests.integrations.megatron.runs import VOCABULARY, logits_of, make_sequences, packed_of, thd
from tests.support.megatron_cpu import ON_CPU, stub_transformer_engine


def make_qwen3(folder: Path) -> Any:
    """A tiny Qwen3 with weights far from uniform, saved too."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        max_position_embeddings=128,
        architectures=["Qwen3ForCausalLM"],
    )
    model = transformers.Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return model


def make_provider(bridge: Any) -> Any:
    from megatron.bridge.models.gpt_provider import local_layer_spec

    provider = bridge.to_megatron_provider(load_weights=False)
    for name, value in (ON_CPU | {"params_dtype": torch.float32}).items():
        setattr(provider, name, value)
    # in the place of TransformerEngine's, which needs a GPU
    provider.transformer_layer_spec = local_layer_spec
    return provider


def switch_on(provider: Any) -> None:
    provider.transformer_layer_spec = tree_spec(provider.transformer_layer_spec)
    provider.register_pre_wrap_hook(pack_batches)


def provide(provider: Any) -> Any:
    provider.finalize()
    (model,) = provider.provide_distributed_model(
        wrap_with_ddp=False, bf16=False, fp16=False, use_cpu_initialization=True
    )
    return model


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Differences to transformers, and the weights there and back."""
    stub_transformer_engine()
    from megatron.bridge import AutoBridge

    parallel_state.initialize_model_parallel()
    path = folder / "qwen3"
    reference = make_qwen3(path)
    bridge = AutoBridge.from_hf_pretrained(str(path))
    provider = make_provider(bridge)
    switch_on(provider)
    model = provide(provider)
    bridge.load_hf_weights([model], str(path))

    sequences = make_sequences()
    expected = []
    with torch.no_grad():
        for sequence in sequences:
            logp = reference(torch.tensor([sequence])).logits[0].log_softmax(-1)[:-1]
            target = torch.tensor(sequence[1:], dtype=torch.int64)[:, None]
            expected.append(logp.gather(1, target)[:, 0])

    def largest(found: list[torch.Tensor]) -> float:
        pairs = zip(found, expected, strict=True)
        return max(float((a - b).abs().max()) for a, b in pairs if a.numel())

    rows: list[int] = []
    model.decoder.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["hidden_states"].shape[0]),
        with_kwargs=True,
    )
    inputs = thd(sequences)
    logits = logits_of(model(**inputs), inputs, len(sequences))
    shared = [
        x.log_softmax(-1)[:-1].gather(1, torch.tensor(s[1:], dtype=torch.int64)[:, None])[:, 0]
        for x, s in zip(logits, sequences, strict=True)
    ]
    padding = inputs["packed_seq_params"].cu_seqlens_q.diff()[len(sequences) :].sum()
    scores = tree_logprobs(model, packed_of(sequences))
    assert not isinstance(scores, torch.Tensor)
    weights = dict(bridge.export_hf_weights([model], cpu=True))
    attention = model.decoder.layers[0].self_attention
    # Megatron keeps the backend of the first model in the environment
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    local = make_provider(bridge)
    switch_on(local)
    local.attention_backend = AttnBackend.local
    try:
        check_model(provide(local))
        refused = "not refused"
    except UnsupportedError as error:
        refused = str(error)
    return {
        "lines": [
            line.strip() for line in inspect.getsource(switch_on).splitlines()[1:] if line.strip()
        ],
        "attention": type(attention).__name__,
        "core": type(attention.core_attention).__name__,
        "rows": rows[0],
        "distinct": packed_of(sequences).num_tokens + int(padding),
        "tokens": sum(map(len, sequences)),
        "pack_batches": largest(shared),
        "scored edges": largest(scores.logprobs),
        "names": sorted(reference.state_dict()),
        "names back": sorted(weights),
        "equal": all(torch.equal(weights[n], w) for n, w in reference.state_dict().items()),
        "local": refused,
    }
