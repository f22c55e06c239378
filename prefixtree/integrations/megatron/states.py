"""`ForestDeltaNet`, `ForestMamba`: Megatron's layers with a state along a packed forest.

Both are projections, gates and norms around a convolution and a recurrence. Megatron's run through
the tokens in packed order; for a forest they are prefixtree's, and the rest stays Megatron's, with
the heads and groups of this rank under tensor parallelism.

Legend: T packed tokens, d hidden size, H heads of this rank, P size of a head.
"""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mamba_mixer import MambaMixer

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.megatron.parameters import ForestParams
from prefixtree.kernels.recurrence import tree_conv, tree_delta_rule, tree_ssd
from prefixtree.packing.mask import TreeMask

if TYPE_CHECKING:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet as _DeltaNet
    from megatron.core.ssm.mamba_mixer import MambaMixer as _Mixer
else:
    _DeltaNet = _Mixer = object


class ForestDeltaNet(_DeltaNet):
    """Stands before GatedDeltaNet."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """hidden_states [T, 1, d] of a forest, or a rank's part of them -> the same, a bias."""
        kwargs["packed_seq_params"] = packed_seq_params
        if any(isinstance(a, ForestParams) for a in args):
            raise UnsupportedError(
                "packed_seq_params came by position to a GatedDeltaNet, expected by keyword"
            )
        if not isinstance(packed_seq_params, ForestParams):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        assert packed_seq_params.local is not None
        mask = packed_seq_params.local.mask
        rule: Any = self.gated_delta_rule
        self.gated_delta_rule: Any = partial(_delta_rule, mask)
        try:
            return _along(mask)(self, hidden_states, attention_mask, *args, **kwargs)
        finally:
            self.gated_delta_rule = rule


def _along(mask: TreeMask) -> Any:
    """GatedDeltaNet's own forward, in which the name of its convolution means that of a tree."""
    forward = GatedDeltaNet.forward
    names = forward.__globals__ | {"causal_conv1d": partial(_conv, mask)}
    made = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _conv(
    mask: TreeMask, x: torch.Tensor, weight: Any, bias: Any, activation: str, **_: Any
) -> tuple[torch.Tensor, None]:
    """As fla's causal_conv1d: x [1, T, D] -> [1, T, D]."""
    return tree_conv(x[0], weight, bias, mask, activation)[None], None


def _delta_rule(
    mask: TreeMask, query: Any, key: Any, value: Any, g: Any, beta: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """As fla's chunk_gated_delta_rule: [1, T, H, ...] -> [1, T, H, P]."""
    return tree_delta_rule(query[0], key[0], value[0], g[0], beta[0], mask)[None], None


class ForestMamba(_Mixer):
    """Stands before MambaMixer."""

    def _ssm_training(self, zxBCdt: torch.Tensor, packed_seq_params: Any = None) -> torch.Tensor:
        """[T, 1, what the projection gives] -> [T, 1, H P]; Megatron has one fused call here."""
        if not isinstance(packed_seq_params, ForestParams):
            return super()._ssm_training(zxBCdt, packed_seq_params)
        assert packed_seq_params.local is not None
        mask, local = packed_seq_params.local.mask, self.cp
        groups, inner = local.ngroups_local_tpcp, local.d_inner_local_tpcp
        states = groups * self.d_state
        sizes = [inner, inner + 2 * states, local.nheads_local_tpcp]
        z, xBC, dt = zxBCdt[:, 0].split(sizes, -1)
        weight, bias = local.get_conv1d_weight()[:, 0], local.get_conv1d_bias()
        xBC = tree_conv(xBC, weight, bias, mask, self.activation)
        x, B, C = xBC.split([inner, states, states], -1)
        D = local.get_D().float()
        y = tree_ssd(
            x.unflatten(-1, (-1, self.headdim)),
            dt,
            -local.get_A_log().float().exp(),
            B.unflatten(-1, (groups, -1)),
            C.unflatten(-1, (groups, -1)),
            mask,
            D=D.view(-1, self.headdim) if self.D_has_hdim else D,
            dt_bias=local.get_dt_bias().float(),
            dt_softplus=True,
        )
        y = (y.flatten(1).float() * F.silu(z.float())).to(zxBCdt.dtype)[:, None]
        return self.norm(y) if self.rmsnorm else y


#: Megatron's class -> what stands before it.
SERVED = {GatedDeltaNet: ForestDeltaNet, MambaMixer: ForestMamba}


def has_state(module: Any) -> bool:
    """Whether a module is a layer with a state that follows forests."""
    return isinstance(module, (ForestDeltaNet, ForestMamba))


def state_of(layer: Any) -> Any:
    """The part of a layer that has a state and follows forests, if there is one."""
    mixer = getattr(layer, "mixer" if isinstance(layer, MambaLayer) else "self_attention", None)
    return mixer if has_state(mixer) else None


def check_state(name: str, mixer: Any) -> None:
    """Refuses settings with which Megatron's code would pass the tree by.

    Raises:
        UnsupportedError: with the setting and the way to mend it.
    """
    if (size := mixer.config.context_parallel_size) > 1:
        raise UnsupportedError(
            f"packed forests are not served with context_parallel_size={size} and {name}: states "
            "are not handed on between ranks; set it to 1"
        )
    if isinstance(mixer, ForestDeltaNet) and mixer.config.deterministic_mode:
        raise UnsupportedError(
            f"packed forests are not served with deterministic_mode=True and {name}: torch's "
            "convolution reads the packed order; set it to False (ours are deterministic)"
        )
    if isinstance(mixer, ForestMamba) and not mixer.use_mem_eff_path:
        raise UnsupportedError(
            f"packed forests are not served with use_mamba_mem_eff_path=False and {name}; set it "
            "to True"
        )
