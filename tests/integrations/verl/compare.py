"""Whether a run with packed forests is the run that verl's own engine gives."""

from __future__ import annotations

from typing import Any

from tests.integrations.verl.cases import Settings

# what verl averages over micro-batches, however many tokens each has
_MEANS = ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "vf_clipfrac", "vpred_mean", "kl_coef")
_MACHINE = ("perf/", "mfu", "prefixtree/")


def difference(a: Any, b: Any) -> float:
    """The greatest absolute difference of two lists (of tensors or numbers) of one length."""
    assert len(a) == len(b), (len(a), len(b))
    return max(
        float(abs(x - y).max() if hasattr(x, "max") else abs(x - y))
        for x, y in zip(a, b, strict=True)
    )


def check_same(stock: Any, packed: Any, settings: Settings) -> dict[str, float]:
    """Asserts that everything agrees, and returns the greatest differences.

    Log-probabilities, entropies and values, metrics of every update (relative to their size) and
    parameters after the last one, each to the settings' tolerance; parameters to a twentieth of
    what half of them changed by, too.
    """
    assert isinstance(stock, dict), stock
    assert isinstance(packed, dict), packed
    worst = {}
    assert stock["infer"].keys() == packed["infer"].keys()
    for name, values in stock["infer"].items():
        worst[name] = difference(values, packed["infer"][name])
        assert worst[name] < settings.score_tolerance, name
    compared = set()
    for name, values in stock["metrics"].items():
        key = name.split(": ")[1]
        if key.startswith(_MACHINE):
            continue
        if not settings.same_steps and key.split("/")[-1] in _MEANS:
            continue
        scale = max(1.0, *(abs(float(v)) for v in values))
        worst[name] = difference(values, packed["metrics"][name]) / scale
        assert worst[name] < settings.tolerance, (name, values, packed["metrics"][name])
        compared.add(key)
    roles = stock["parameters"].keys()
    assert {"loss", "grad_norm", "actor/pg_loss", "actor/entropy_loss"} <= compared
    assert ("kl_loss" if settings.algorithm == "grpo" else "critic/vf_loss") in compared
    for role in roles:
        before, after = stock["start"][role], stock["parameters"][role]
        adapted = [n for n in after if "lora_" in n]
        change = {n: float((after[n] - before[n]).abs().max()) for n in adapted or after}
        if of_encoder := [n for n in change if "visual." in n]:
            # weights decay where there is no image too, as gradients are zeros
            is_still = settings.images is None and settings.weight_decay == 0
            assert (max(change[n] for n in of_encoder) == 0) == is_still
            change = {n: c for n, c in change.items() if not is_still or n not in of_encoder}
        moved = sorted(change.values())
        names = list(after)
        other = packed["parameters"][role]
        worst[f"{role} parameters"] = difference(
            [after[n] for n in names], [other[n] for n in names]
        )
        # equal parameters show something only where updates changed them
        bound = min(settings.tolerance, moved[len(moved) // 2] / 20)
        assert worst[f"{role} parameters"] < bound, moved
    return worst
