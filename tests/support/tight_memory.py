"""A device on which kept trunks that recompute nothing do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from prefixtree.recompute import trunk_modes
from prefixtree.recompute.trunk_modes import KeptPlan
from tests.support.hooks import limit


def tighten(monkeypatch: pytest.MonkeyPatch, share: float = 0.5) -> list[KeptPlan]:
    """Gives "auto" in kept trunks a share of what they take without recomputation -> its plans."""
    plans: list[KeptPlan] = []
    real = trunk_modes.plan_kept

    def planned(*given: Any, **options: Any) -> KeptPlan:
        available = share * real(*given[:-1], 1 << 60, **options).peak_bytes
        plans.append(real(*given[:-1], available, **options))
        assert plans[-1].peak_bytes <= available
        modes = {part.modes for part in plans[-1].of_part}
        assert plans[-1].runs_again or len(modes) > 1
        return plans[-1]

    monkeypatch.setattr(trunk_modes, "plan_kept", planned)
    # chunks of logits are as small as the models
    limit(monkeypatch, "logits of plans", 1 << 12)
    return plans
