"""RoPE whose frequencies depend on the longest sequence of a forward: where it is exact.

transformers looks at the largest position of a forward (`dynamic_rope_update`): a packed forest's
is that of its longest sequence, a part's that of its own deepest token. A forest is exact where all
of these choose the frequencies of each sequence alone. `dynamic` has fixed ones up to
`max_position_embeddings` and changes them with every token after it. `longrope` has one set up to
`original_max_position_embeddings` and another after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.packing.host_mask import HostMask

STATIC = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
_BY_LENGTH = frozenset({"dynamic", "longrope"})


def check_rope_types(config: Any) -> None:
    """Refuses types of RoPE that are not known."""
    for kind, _ in ropes_of(config):
        if kind not in STATIC | _BY_LENGTH:
            raise UnsupportedError(
                f"RoPE type {kind!r} is not verified on packed forests: its frequencies may depend "
                f"on the longest sequence of a batch. Verified are "
                f"{', '.join(sorted(STATIC | _BY_LENGTH))}; train this model with "
                'attn_implementation="sdpa"'
            )


def fixed_lengths(config: Any) -> list[tuple[str, int]]:
    """Lists types of RoPE that depend on lengths, each with the length up to which they do not."""
    return [
        (kind, _original_length(config, entry) if kind == "longrope" else _most_positions(config))
        for kind, entry in ropes_of(config)
        if kind in _BY_LENGTH
    ]


def check_lengths(config: Any, host: HostMask, divided: str | None = None) -> None:
    """Refuses forests whose sequences, each alone, would be rotated by other frequencies.

    Args:
        divided: words for what cuts the forest into several forwards. Default: one forward.
    """
    for kind, limit in fixed_lengths(config):
        if (longest := host.deepest) <= limit:
            continue
        if kind == "dynamic":
            raise UnsupportedError(
                f"dynamic RoPE has other frequencies for each length beyond "
                f"config.max_position_embeddings ({limit}), so that nothing can be shared there, "
                f"and a sequence of this forest has {longest} tokens: leave out or cut sequences "
                f"of more than {limit}; shorter ones are exact"
            )
        why = (
            f"longrope has other frequencies for sequences of more than {limit} tokens "
            "(original_max_position_embeddings) than for shorter ones"
        )
        if divided is not None:
            raise UnsupportedError(
                f"{why}, and {divided} would show it a part of the forest, whose sequences have up "
                f"to {longest}: compute the forest in one forward, or in forests of sequences of "
                f"at most {limit} tokens"
            )
        if host.shortest is None:
            raise UnsupportedError(
                f"{why}. This mask holds paths of up to {longest} and does not know where "
                "sequences end: score the forest with sequence_logprobs, in one forward"
            )
        if host.shortest <= limit:
            raise UnsupportedError(
                f"{why}, and this forest has both: its sequences have {host.shortest} to {longest} "
                f"tokens. Score two forests, one of the sequences of at most {limit} tokens and "
                "one of the longer ones; each is exact"
            )


def check_rope(model: nn.Module, host: HostMask, divided: str | None = None) -> None:
    """Refuses a forest that the model's RoPE, as it stands now, would rotate otherwise."""
    config: Any = model.config
    config = config.get_text_config()
    check_lengths(config, host, divided)
    if ("dynamic", longest := host.deepest) not in fixed_lengths(config):
        return
    # transformers resets the frequencies for sequences below the limit, not for one of just that
    for module in model.modules():
        for name, value in vars(module).items():
            if name.endswith("max_seq_len_cached") and int(value) > longest:
                raise UnsupportedError(
                    f"dynamic RoPE still has the frequencies of a sequence of {int(value)} tokens "
                    f"that ran before, and would use them for one of {longest}, which this forest "
                    "has: run a shorter sequence through the model, which resets them"
                )


def longest_row(model: nn.Module, host: HostMask) -> int | None:
    """The length to which a row may grow with keys of its forest's forward; None without bound."""
    config: Any = model.config
    limits = [limit for _, limit in fixed_lengths(config.get_text_config())]
    # rows of `longrope` that are all beyond it stay there
    return min((limit for limit in limits if host.deepest <= limit), default=None)


def as_default_rope(config: Any) -> None:
    """Gives a text configuration, in place, RoPE of frequencies that do not depend on lengths."""
    for kind, entry in ropes_of(config):
        if kind in _BY_LENGTH:
            # keeps the entries that other types have too
            for name in entry.keys() - {"rope_theta", "partial_rotary_factor", "mrope_section"}:
                del entry[name]
            entry["rope_type"] = "default"


def ropes_of(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields types and parameters of RoPE, one for all layers or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    for entry in nested or [parameters]:
        yield str(entry.get("rope_type", entry.get("type", "default"))), entry


def _original_length(config: Any, entry: dict[str, Any]) -> int:
    name = "original_max_position_embeddings"
    return int(entry.get(name) or getattr(config, name, None) or _most_positions(config))


def _most_positions(config: Any) -> int:
    return int(config.max_position_embeddings)
