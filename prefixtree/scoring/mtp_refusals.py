"""Refuses heads of multi-token prediction that would not run as transformers runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from prefixtree.errors import Refusal
from prefixtree.kernels.lm_head.eager import LogitRule
from prefixtree.models.checks import runs_deepspeed
from prefixtree.models.family_table import ATTENTION_TYPES, layer_types_of
from prefixtree.models.layers import groups_of
from prefixtree.models.rows_alone import foreign_code
from prefixtree.packing.layout import PackedForest
from prefixtree.scoring.lm_head import is_linear, logit_rule

if TYPE_CHECKING:
    from prefixtree.scoring.forward import AskedWings

#: Model types whose heads a test compares with transformers' own, sequence by sequence.
VERIFIED = frozenset(
    {
        *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "mellum", "qwen3", "qwen3_moe"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    }
)


class AskedHeads(NamedTuple):
    """A call's model, transformers' model in it, `mtp`, the heads in it, and what else it asks."""

    model: nn.Module
    causal_lm: Any
    mtp: nn.Module
    heads: Any
    packed: PackedForest
    wings: AskedWings
    with_router_loss: bool


def _is_sharded(asked: AskedHeads) -> bool:
    kinds = FSDPModule, FullyShardedDataParallel
    models = asked.model, asked.mtp
    return (
        any(isinstance(module, kinds) for model in models for module in model.modules())
        or any(map(runs_deepspeed, models))
        or any(hasattr(p, "placements") for p in asked.heads.parameters())
    )


def _is_ddp(model: nn.Module) -> bool:
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())


def _is_plain_head(head: Any) -> bool:
    return is_linear(head) and "forward" not in vars(head) and not head._forward_hooks


def _model_type(asked: AskedHeads) -> Any:
    kind = asked.heads.config.model_type
    return kind not in VERIFIED and {"kind": kind, "verified": ", ".join(sorted(VERIFIED))}


def _layer_types(asked: AskedHeads) -> Any:
    others = sorted({*layer_types_of(asked.heads.config)} - ATTENTION_TYPES)
    return others and {"others": ", ".join(others)}


def _window(asked: AskedHeads) -> Any:
    """Finds a layer whose attention slides by itself: transformers' mask for it does not."""
    kinds = layer_types_of(asked.heads.config)
    for number, layer in enumerate(asked.heads.layers):
        slides = len(kinds) > number and kinds[number] == "sliding_attention"
        windows = [vars(module).get("sliding_window") for module in layer.modules()]
        if any(windows) and not slides:
            return {"number": number}
    return None


def _foreign(asked: AskedHeads) -> Any:
    foreign = foreign_code(asked.heads)
    return foreign and {"foreign": foreign[0]}


#: Refusals of heads (`mtp=`), of `AskedHeads`.
MTP = (
    Refusal(
        "forward_layer",
        lambda asked: not hasattr(asked.heads, "forward_layer"),
        "mtp= needs MtpModel.forward_layer; use transformers 5.23 or later",
    ),
    Refusal(
        "model type",
        _model_type,
        "multi-token prediction of {kind} is not verified, only of {verified}; leave mtp out",
    ),
    Refusal(
        "layer types",
        _layer_types,
        "layers of mtp ({others}) do not only attend, which is not verified; set "
        "config.mtp_layer_types to full_attention or sliding_attention, or leave mtp out",
    ),
    Refusal(
        "sliding_window",
        _window,
        "layer {number} of mtp has a sliding window that config.mtp_layer_types does not name, so "
        "transformers' attentions differ in whether it slides; set config.sliding_window to None",
    ),
    Refusal(
        "attention",
        lambda asked: asked.heads.config._attn_implementation != "prefixtree",
        "mtp was made before the model was prepared, and attends otherwise; call "
        'mtp.set_attn_implementation("prefixtree")',
    ),
    Refusal(
        "another model",
        lambda asked: (
            asked.heads.embed_tokens is not asked.causal_lm.get_input_embeddings()
            or asked.heads.shared_head is not asked.causal_lm.get_output_embeddings()
        ),
        "mtp has other embeddings or another lm_head than the model: it was made of another model, "
        "or they were replaced later; call mtp.tie_with_main_model(model)",
    ),
    Refusal(
        "lm_head",
        lambda asked: (
            not _is_plain_head(asked.heads.shared_head)
            or logit_rule(asked.causal_lm) != LogitRule()
        ),
        "mtp is verified with an lm_head that is nn.Linear and whose logits stay as they are; use "
        "no adapter and no quantisation of the lm_head, or leave mtp out",
    ),
    Refusal(
        "foreign code",
        _foreign,
        "mtp has code that is not transformers' ({foreign}), which may mix tokens; remove it, or "
        "leave mtp out",
    ),
    Refusal(
        "sharded",
        _is_sharded,
        "a model that FSDP, DeepSpeed or tensor parallelism shards has no whole embeddings and "
        "lm_head for mtp; use DistributedDataParallel, or leave mtp out",
    ),
    Refusal(
        "ranks",
        lambda asked: (
            not asked.wings.mtp_detach
            and _is_ddp(asked.model)
            and any(group.size() > 1 for group in groups_of(asked.model))
        ),
        "mtp_detach=False is not verified with DistributedDataParallel over several ranks; set "
        "mtp_detach=True",
    ),
    Refusal(
        "wrapper",
        lambda asked: _is_ddp(asked.mtp),
        "DistributedDataParallel around mtp would average nothing, as its forward is not called; "
        "give its .module, and average the gradients over ranks before the optimizer's step",
    ),
    Refusal(
        "routes",
        lambda asked: asked.packed.forest.routes is not None,
        "recorded routes are of the model's own layers, and mtp has routers too; make the forest "
        "without routes, or leave mtp out",
    ),
    Refusal(
        "images",
        lambda asked: asked.wings.images is not None,
        "images are not verified with mtp; leave one of the two out",
    ),
    Refusal(
        "output_router_logits",
        lambda asked: asked.with_router_loss,
        "the load-balancing loss is not verified with mtp, whose experts it leaves out; set "
        "output_router_logits=False, or leave mtp out",
    ),
    Refusal(
        "recompute",
        lambda asked: asked.wings.recompute == "auto",
        "recompute='auto' does not plan for the memory of mtp; give recompute='all', "
        "'all_but_attention' or 'nothing'",
    ),
)
