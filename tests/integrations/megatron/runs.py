"""Tiny Megatron models, batches of sequences, and two ways to run them: as a packed forest, and one
sequence at a time through Megatron's own attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from packaging.version import Version

from prefixtree import MeasuredEdges, PackedForest, PrefixForest, pack
from prefixtree.integrations.megatron import pack_batches, tree_logprobs, tree_spec
from prefixtree.integrations.megatron.version import installed
from tests.support.megatron_cpu import DEVICE, Norm, with_norms

#: The older version differs in nothing that context parallelism meets.
NEWEST = Version(installed()) >= Version("0.19")
VOCABULARY = 256
# exact in float32
TEMPERATURE = 0.75
# as Megatron-Bridge's providers have it
YARN = {
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": None,
    "mscale_all_dim": None,
    "correction_range_round_to_int": True,
}


_EXPECTED: dict[str, Result] = {}


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        config: changes to the configuration below.
        tied: whether the output layer has the embedding's weight.
        model: "gpt" or "hybrid".
        dtype: of parameters and activations.
        way: "scored edges", "measure" (the same by a measure), "pack_batches" or "scored batches"
            (the same with a temperature).
        positions: Megatron's position_embedding_type.
        backend: of tree attention. Default: "auto", as always with `pack_batches`.
        masked: whether scored edges are scored over `kept_tokens`.
    """

    config: dict[str, Any] | None = None
    tied: bool = False
    model: str = "gpt"
    dtype: torch.dtype = torch.float64
    way: str = "scored edges"
    positions: str = "rope"
    backend: str | None = None
    masked: bool = False


def moe(**changes: Any) -> dict[str, Any]:
    """Settings of experts, for Case.config."""
    return {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 48,
        "moe_router_load_balancing_type": "none",
        # the other one hands gloo tensors on a GPU
        "moe_token_dispatcher_type": "allgather" if DEVICE.type == "cpu" else "alltoall",
        "moe_router_dtype": "fp64",
        **changes,
    }


def latent(**changes: Any) -> dict[str, Any]:
    """Settings of latent attention, for Case.config."""
    return {
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 20,
        # what the local core attention takes for the values' size
        "kv_channels": 20,
        "num_query_groups": 4,
        "rope_type": "rope",
        **changes,
    }


def make_config(case: Case) -> TransformerConfig:
    size = parallel_state.get_tensor_model_parallel_world_size()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    settings: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 32,
        "ffn_hidden_size": 96,
        "use_cpu_initialization": True,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "params_dtype": case.dtype,
        "tensor_model_parallel_size": size,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "pipeline_model_parallel_size": stages,
        "pipeline_dtype": case.dtype,
        "variable_seq_lengths": stages > 1,
        # the default cannot take micro-batches of several lengths, with or without experts
        "moe_token_dispatcher_type": "alltoall",
        "virtual_pipeline_model_parallel_size": virtual_stages(),
        "batch_p2p_comm": False,
    }
    settings |= case.config or {}
    latent = settings.get("multi_latent_attention", False)
    config = (MLATransformerConfig if latent else TransformerConfig)(**settings)
    if case.positions == "yarn":
        for name, value in YARN.items():
            setattr(config, f"yarn_{name}", value)
    return config


def virtual_stages() -> int | None:
    return parallel_state.get_virtual_pipeline_model_parallel_world_size()


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Megatron's local spec, with a norm that sequence parallelism may run with."""
    latent = config.multi_latent_attention
    compressed = not latent or config.q_lora_rank is not None
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=compressed,
        normalization="RMSNorm",
        multi_latent_attention=latent,
    )
    if latent:
        # TransformerEngine has the norm of a query that is not compressed in its linear layer
        return with_norms(spec, ("q_layernorm", "kv_layernorm"), Norm if compressed else IdentityOp)
    return with_norms(spec)


def block_spec(config: TransformerConfig, spec: ModuleSpec) -> Any:
    """Megatron's block of multi-token prediction with layers of a spec; None without them."""
    if not config.mtp_num_layers:
        return None
    block = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), Norm)
    layers = [replace(s, submodules=replace(s.submodules, **norms)) for s in block.layer_specs]
    return replace(block, layer_specs=layers)


def stack_spec(config: TransformerConfig) -> ModuleSpec:
    """A hybrid stack of attention layers and MLP layers, from the local spec's parts."""
    layer = layer_spec(config).submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=layer.input_layernorm,
        self_attention=layer.self_attention,
        self_attn_bda=layer.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=layer.mlp_bda
    )
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )


def build(case: Case, wrap: Callable[[Any], Any] = tree_spec, vp_stage: int | None = None) -> Any:
    """The model of a case on this rank, with weights that make attention and softmax far from
    uniform; the same for every `wrap`."""
    config = make_config(case)
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_sequence_length": 256,
        "position_embedding_type": case.positions,
        "share_embeddings_and_output_weights": case.tied,
        "pre_process": first,
        "post_process": last,
        "vp_stage": vp_stage,
    }
    torch.manual_seed(7)
    if case.model == "gpt":
        spec = wrap(layer_spec(config))
        model = GPTModel(config, spec, mtp_block_spec=block_spec(config, spec), **common)
    else:
        pattern = "*-*-*-"
        config.num_layers = len(pattern)
        spec = wrap(stack_spec(config))
        model = HybridModel(config, spec, hybrid_layer_pattern=pattern, **common)
    model = model.to(case.dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            if "norm" in name:
                parameter.add_(noise * 0.2)
            elif "softmax_offset" in name:
                parameter.copy_(noise)
            else:
                parameter.mul_(4)
    return model.to(DEVICE).train()


def wrapped(model: Any, whole: bool = False) -> DistributedDataParallel:
    """Megatron's DDP, in the gradient buffers of its distributed optimizer; or with whole gradients
    on each rank, of which that has a shard."""
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=not whole, grad_reduce_in_fp32=False, overlap_grad_reduce=False
    )
    return DistributedDataParallel(model.config, config, model)


def make_sequences(seed: int = 1) -> list[list[int]]:
    """Prompts under one system prompt, two turns each; sequences that end inside others, a
    duplicate, one token, another tree."""
    generator = torch.Generator().manual_seed(seed)

    def new(count: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()

    system, sequences = new(11), []
    for _ in range(2):
        prompt = system + new(7)
        for _ in range(2):
            turn = prompt + new(5)
            sequences += [turn + new(9), turn + new(4), turn]
    return [*sequences, sequences[0], sequences[0][:1], new(14)]


@dataclass
class Weights:
    """The loss: a random weight on every log-probability and every entropy."""

    logprobs: list[torch.Tensor]
    entropy: list[torch.Tensor]

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], seed: int = 5) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        both = [
            torch.randn(2, len(s) - 1, generator=generator, dtype=torch.float64).to(DEVICE)
            for s in sequences
        ]
        return cls([b[0] for b in both], [b[1] for b in both])

    def loss(self, logprobs: Sequence[torch.Tensor], entropy: Sequence[torch.Tensor]) -> Any:
        scored = zip((*self.logprobs, *self.entropy), (*logprobs, *entropy), strict=True)
        return sum((w * x.double()).sum() for w, x in scored)


@dataclass
class Result:
    """A run: log-probabilities and entropies per sequence, gradients per parameter."""

    logprobs: list[torch.Tensor]
    entropy: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def padded_to() -> int | None:
    size = parallel_state.get_tensor_model_parallel_world_size()
    return size if size > 1 else None


def packed_of(sequences: Sequence[Sequence[int]], multiple: int | None = None) -> PackedForest:
    packed = pack(PrefixForest.from_sequences(sequences), pad_to_multiple_of=multiple)
    return packed.to(DEVICE)


def thd(sequences: Sequence[Sequence[int]], gap: int = 0) -> dict[str, Any]:
    """A batch as trainers send it: the sequences in a row, `gap` tokens of padding behind each, and
    as the last sequence padding up to a multiple of 8."""
    flat, starts, ends = [], [0], [0]
    for sequence in sequences:
        flat += [*sequence, *[0] * gap]
        starts.append(len(flat))
        ends.append(ends[-1] + len(sequence))
    if padding := -len(flat) % 8:
        flat += [0] * padding
        starts.append(len(flat))
        ends.append(ends[-1] + padding)
    padded, ends = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (starts, ends))
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded if gap else None,
        cu_seqlens_kv_padded=padded if gap else None,
        max_seqlen_q=64,
        max_seqlen_kv=64,
    )
    return {
        "input_ids": torch.tensor([flat], device=DEVICE),
        "position_ids": None,
        "attention_mask": None,
        "packed_seq_params": params,
    }


def kept_tokens(sequence: Sequence[int]) -> list[list[int]]:
    """Up to 4 tokens in the place of each, itself among them; each fifth has no set."""
    return [
        sorted({(token + 61 * more) % VOCABULARY for more in range(at % 5)})
        for at, token in enumerate(sequence)
    ]


def columns(
    logits: torch.Tensor, sequence: Sequence[int], masked: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [n - 1] from logits [n, vocabulary of this rank]."""
    whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits)[: len(sequence) - 1]
    for at, kept in enumerate(kept_tokens(sequence)[1:] if masked else []):
        others = sorted(set(range(whole.shape[1])) - set(kept)) if kept else []
        index = torch.tensor([at]), torch.tensor(others, dtype=torch.int64)
        whole = whole.index_put(index, whole.new_tensor(-1e9)) if others else whole
    logp = (whole / TEMPERATURE).log_softmax(-1)
    target = torch.tensor(sequence[1:], dtype=torch.int64, device=DEVICE)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def logits_of(output: torch.Tensor, inputs: dict[str, Any], count: int) -> list[torch.Tensor]:
    """The logits of the first `count` sequences of a THD batch."""
    params = inputs["packed_seq_params"]
    starts = params.cu_seqlens_q_padded
    starts = (params.cu_seqlens_q if starts is None else starts)[:count].tolist()
    lengths = params.cu_seqlens_q.diff()[:count].tolist()
    return [output[0, s : s + n] for s, n in zip(starts, lengths, strict=True)]


def gaps(inputs: dict[str, Any]) -> list[int]:
    """The tokens of a THD batch that no sequence has."""
    params = inputs["packed_seq_params"]
    first, lengths = params.cu_seqlens_q_padded.tolist(), params.cu_seqlens_q.diff().tolist()
    return [
        t for s, n, end in zip(first, lengths, first[1:], strict=False) for t in range(s + n, end)
    ]


def alone(model: Any, sequence: Sequence[int], multiple: int | None) -> torch.Tensor:
    """The output of a model for one sequence, padded on the right, by Megatron's own attention."""
    row = [*sequence, *[0] * (-len(sequence) % (multiple or 1))]
    ids = torch.tensor([row], device=DEVICE)
    mask = torch.ones(1, 1, len(row), len(row), dtype=torch.bool, device=DEVICE).triu(1)
    return model(ids, torch.arange(len(row), device=DEVICE)[None], mask)


def run_forest(
    model: Any, case: Case, sequences: list[list[int]], weights: Weights, gap: int = 0
) -> Result:
    """The packed forest, through scored edges or `pack_batches`."""
    ddp = wrapped(model)
    if case.way in ("pack_batches", "scored batches"):
        scored = case.way == "scored batches"
        pack_batches(ddp, TEMPERATURE if scored else None)
        inputs = thd(sequences, gap)
        output = ddp(**inputs)
        rows = logits_of(output, inputs, len(sequences))
        # what is behind sequences is no copy of a token
        assert not gap or not torch.stack([output[0, s] for s in gaps(inputs)]).any()
        if scored:
            assert output.shape == (*inputs["input_ids"].shape, 2)
            both = [x[:-1].unbind(1) for x in rows]
            assert not torch.stack([x[-1] for x in rows]).any()
        else:
            both = [columns(x, s) for x, s in zip(rows, sequences, strict=True)]
        logprobs, entropy = [b[0] for b in both], [b[1] for b in both]
    elif case.way == "measure":
        multiple = padded_to() if model.config.sequence_parallel else None
        packed = packed_of(sequences, multiple)

        def both_of(logits: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
            log_p = logits.log_softmax(-1)
            taken = log_p.gather(1, edges.token[:, None])
            return torch.cat([taken, -(log_p.exp() * log_p).sum(-1, keepdim=True)], 1)

        scores = tree_logprobs(ddp, packed, TEMPERATURE, measure=both_of, chunk_size=9)
        assert not isinstance(scores, torch.Tensor) and scores.measured is not None
        logprobs = [m[:, 0] for m in scores.measured]
        entropy = [m[:, 1] for m in scores.measured]
    else:
        multiple = padded_to() if model.config.sequence_parallel else None
        packed = packed_of(sequences, multiple).with_options(backend=case.backend)
        masks = [kept_tokens(s) for s in sequences] if case.masked else None
        scores = tree_logprobs(ddp, packed, TEMPERATURE, return_entropy=True, sampling_masks=masks)
        assert not isinstance(scores, torch.Tensor) and scores.entropy is not None
        logprobs, entropy = scores.logprobs, scores.entropy
    weights.loss(logprobs, entropy).backward()
    return Result([x.detach() for x in logprobs], [x.detach() for x in entropy], gradients(ddp))


def run_replicated(
    model: Any, sequences: list[list[int]], weights: Weights, masked: bool = False
) -> Result:
    """One sequence after another."""
    ddp = wrapped(model)
    multiple = padded_to() if model.config.sequence_parallel else None
    both = []
    for at, sequence in enumerate(sequences):
        logits = alone(ddp, sequence, multiple)[0, : len(sequence)]
        logprobs, entropy = columns(logits, sequence, masked)
        one = Weights([weights.logprobs[at]], [weights.entropy[at]])
        one.loss([logprobs], [entropy]).backward()
        both.append((logprobs.detach(), entropy.detach()))
    return Result([b[0] for b in both], [b[1] for b in both], gradients(ddp))


def gradients(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """After Megatron's own reductions over ranks."""
    finalize_model_grads([ddp])
    return {name: p.main_grad.clone() for name, p in ddp.module.named_parameters()}


@dataclass
class Errors:
    """Largest differences: absolute for scores; for gradients, of a parameter's largest."""

    logprobs: float
    entropy: float
    gradients: float
    at: str

    @property
    def worst(self) -> float:
        return max(self.logprobs, self.entropy, self.gradients)


def errors(result: Result, expected: Result) -> Errors:
    """Of a run; a parameter without a gradient on one side alone counts as wrong."""
    assert result.gradients.keys() == expected.gradients.keys()

    def largest(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
        pairs = zip(got, want, strict=True)
        return max(float((a - b).abs().max()) for a, b in pairs if a.numel())

    relative = {
        name: float((got - want).abs().max() / want.abs().max().clamp(min=1e-12))
        for (name, got), want in zip(
            result.gradients.items(), expected.gradients.values(), strict=True
        )
    }
    at = max(relative, key=lambda name: relative[name])
    return Errors(
        largest(result.logprobs, expected.logprobs),
        largest(result.entropy, expected.entropy),
        relative[at],
        at,
    )


def compared(case: Case, gap: int = 0) -> Errors:
    """A forest through a model from `tree_spec` against sequences through one from Megatron's spec;
    every parameter has a gradient."""
    sequences = make_sequences()
    # ranks of data parallelism have losses of their own
    weights = Weights.of(sequences, seed=5 + parallel_state.get_data_parallel_rank())
    expected = _expected(case, sequences, weights)
    return errors(run_forest(build(case), case, sequences, weights, gap), expected)


def _expected(case: Case, sequences: list[list[int]], weights: Weights) -> Result:
    """By Megatron's spec, which knows nothing of forests: once for all ways to run one."""
    config = {k: v for k, v in (case.config or {}).items() if not k.startswith("recompute")}
    case = replace(case, config=config, way=Case.way, backend=None)
    ranks = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    if (key := f"{case} on {ranks}") not in _EXPECTED:
        model = build(case, lambda spec: spec)
        expected = run_replicated(model, sequences, weights, case.masked)
        assert all(g.any() for g in expected.gradients.values())
        _EXPECTED[key] = expected
    return _EXPECTED[key]
