"""`ForestDeltaNet`, `ForestMamba`: Megatron's layers with a state along a packed forest.

Both are projections, gates and norms around a convolution and a recurrence. For a forest these two
are prefixtree's; the rest stays Megatron's, with the heads and groups of this rank under tensor
parallelism. Context-parallel ranks exchange tokens for heads around the recurrence alone, so
Megatron's code runs as on one rank. Legend: t tokens of this rank, d hidden size, H heads of this
rank, P size of a head.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mamba_mixer import MambaMixer

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.megatron.context_parallel import Alone, ForestParams
from prefixtree.models.along_tree import with_globals
from prefixtree.states.protocol import KeepsStates

if TYPE_CHECKING:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet as _DeltaNet
    from megatron.core.ssm.mamba_mixer import MambaMixer as _Mixer
else:
    _DeltaNet = _Mixer = object


class ForestDeltaNet(_DeltaNet):
    """A base before GatedDeltaNet: convolution and recurrence follow the forest."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the layer over hidden_states [t, 1, d] of a forest; gives [t, 1, d] and a bias."""
        kwargs["packed_seq_params"] = packed_seq_params
        if any(isinstance(a, ForestParams) for a in args):
            raise UnsupportedError(
                "packed_seq_params came by position to a GatedDeltaNet, expected by keyword"
            )
        if not isinstance(packed_seq_params, ForestParams):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        local = packed_seq_params.local
        assert local is not None
        # a copy with the same parameters, which a recomputation may call later
        mixer: Any = copy.copy(self)
        mixer.gated_delta_rule = partial(_delta_rule, local.states)
        if self.cp_size > 1:
            mixer.cp_size, mixer.pg_collection = 1, copy.copy(self.pg_collection)
            mixer.pg_collection.cp = Alone()
            # exists since 0.19
            if hasattr(self, "feat_dim_split"):
                query, key, value, *others = self.in_proj_split_sections
                mixer.feat_dim_split = (query + key + value, *others)
        # Megatron's own code, in which the convolution's name means the tree's
        of_tree = {"causal_conv1d": lambda _: partial(_conv, local.states)}
        forward = with_globals(GatedDeltaNet.forward, of_tree)
        return forward(mixer, hidden_states, attention_mask, *args, **kwargs)


def _conv(
    states: KeepsStates, x: torch.Tensor, weight: Any, bias: Any, activation: str, **_: Any
) -> tuple[torch.Tensor, None]:
    """Stands in for fla's causal_conv1d: x [1, t, D] -> [1, t, D]."""
    return states.conv(x.squeeze(0), weight, bias, activation)[None], None


def _delta_rule(
    states: KeepsStates, query: Any, key: Any, value: Any, g: Any, beta: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """Stands in for fla's chunk_gated_delta_rule: [1, t, H, ...] -> [1, t, H, P]."""
    rows = (part.squeeze(0) for part in (query, key, value, g, beta))
    return states.delta_rule(*rows)[None], None


class ForestMamba(_Mixer):
    """A base before MambaMixer: convolution and recurrence follow the forest."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any
    ) -> Any:
        """Runs the layer over hidden_states [t, 1, d] of a forest; gives [t, 1, d] and a bias."""
        mixer: Any = self
        if isinstance(packed_seq_params, ForestParams) and self.cp.cp_size > 1:
            mixer, alone = copy.copy(self), copy.copy(self.cp)
            mixer.cp, alone.cp_size = alone, 1
            alone.d_inner_local_tpcp = alone.d_inner_local_tp
            alone.nheads_local_tpcp = alone.nheads_local_tp
            alone.ngroups_local_tpcp = alone.ngroups_local_tp
        kwargs["packed_seq_params"] = packed_seq_params
        return MambaMixer.forward(mixer, hidden_states, *args, **kwargs)

    def _ssm_training(self, zxBCdt: torch.Tensor, packed_seq_params: Any = None) -> torch.Tensor:
        """Replaces Megatron's fused call: the projection's output [t, 1, *] -> [t, 1, H P]."""
        if not isinstance(packed_seq_params, ForestParams):
            return super()._ssm_training(zxBCdt, packed_seq_params)
        forest, local = packed_seq_params.local, self.cp
        assert forest is not None
        groups, inner = local.ngroups_local_tpcp, local.d_inner_local_tpcp
        states = groups * self.d_state
        sizes = [inner, inner + 2 * states, local.nheads_local_tpcp]
        z, xBC, dt = zxBCdt[:, 0].split(sizes, -1)
        weight, bias = local.get_conv1d_weight()[:, 0], local.get_conv1d_bias()
        xBC = forest.states.conv(xBC, weight, bias, self.activation)
        x, B, C = xBC.split([inner, states, states], -1)
        D = local.get_D().float()
        y = forest.states.ssd(
            x.unflatten(-1, (-1, self.headdim)),
            dt,
            -local.get_A_log().float().exp(),
            B.unflatten(-1, (groups, -1)),
            C.unflatten(-1, (groups, -1)),
            D=D.view(-1, self.headdim) if self.D_has_hdim else D,
            dt_bias=local.get_dt_bias().float(),
            dt_softplus=True,
        )
        y = (y.flatten(1).float() * F.silu(z.float())).to(zxBCdt.dtype)[:, None]
        return self.norm(y) if self.rmsnorm else y


#: Megatron's class -> the base that goes before it.
SERVED = {GatedDeltaNet: ForestDeltaNet, MambaMixer: ForestMamba}


def has_state(module: Any) -> bool:
    """Whether a module is a layer with a state that follows forests."""
    return isinstance(module, (ForestDeltaNet, ForestMamba))


def state_of(layer: Any) -> Any:
    """The part of a layer that has a state and follows forests; None without one."""
    mixer = getattr(layer, "mixer" if isinstance(layer, MambaLayer) else "self_attention", None)
    return mixer if has_state(mixer) else None


def check_state(name: str, mixer: Any) -> None:
    """Refuses settings with which Megatron's code would bypass the tree."""
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
