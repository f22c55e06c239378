"""States handed from segment to segment, and the backend on top of it.

FlashQLA's kernels need a Hopper GPU. Here `SegmentsInTorch` does what they do, segment by segment;
`fla/test_flash_qla.py` runs the kernels where they can run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from prefixtree import TreeMask, pack
from prefixtree.kernels.recurrence import flash_qla
from prefixtree.kernels.recurrence.chunked import delta_rule
from prefixtree.kernels.recurrence.protocol import DeltaCall
from prefixtree.kernels.recurrence.states import CHUNK, gradients_of_ends, starts_of
from prefixtree.packing.segments import SegmentTables, segments_of
from prefixtree.planning.part_states import PartStates
from prefixtree.planning.steps import Steps
from tests.kernels.recurrence.test_states import BORDERS, DEVICE, FORESTS, schedule_of, segments_in
from tests.support.full import mostly
from tests.support.recurrence_cases import FORESTS as PACKED
from tests.support.recurrence_cases import forest_of, relative
from tests.support.strategies import mask_of

HEADS, DIM = 2, 16
NAMES = "query", "key", "value", "g", "beta"
# its tensors are on the CPU, where Triton's kernels run in the interpreter alone
IN_TORCH = pytest.mark.skipif(DEVICE.type == "cuda", reason="runs where there is no GPU")


def random_handover(segments: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ends, transitions, dstarts."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(segments, HEADS, *shape, generator=draw)

    return normal(DIM, 2 * DIM), normal(DIM, DIM) / DIM**0.5, normal(DIM, 2 * DIM)


@pytest.mark.parametrize(
    "forest, with_states", [*((f, False) for f in FORESTS), *((f, True) for f in BORDERS)]
)
def test_states_from_parent_to_child_and_back(forest: str, with_states: bool) -> None:
    segments = segments_in(forest, with_states)
    schedule, tables = schedule_of(segments), SegmentTables(segments, DEVICE)
    ends, transitions, dstarts = random_handover(segments.num_segments)
    initial = random_handover(segments.num_entries)[0] + 1
    dfinal = random_handover(len(segments.exits))[2] - 1
    exact = [x.double().requires_grad_() for x in (ends, transitions, initial)]
    starts: list[torch.Tensor] = []
    finals = []
    for segment, parent in enumerate(segments.parent):
        start = finals[parent] if parent >= 0 else torch.zeros_like(exact[0][0])
        if segments.entry[segment] >= 0:
            start = exact[2][segments.entry[segment]]
        starts.append(start)
        finals.append(exact[1][segment] @ start + exact[0][segment])
    exits = torch.from_numpy(segments.exits)
    given = [x.to(DEVICE) for x in (ends, transitions, initial)]
    found, final = starts_of(schedule, *given)
    assert relative(found.cpu(), torch.stack(starts)) < 2e-6
    assert relative(final.cpu(), torch.stack(finals)[exits]) < 2e-6

    # the gradient of a final state is that of `ends`, which is only added to it
    roots = torch.from_numpy((segments.parent < 0) & (segments.entry < 0))
    dstarts[roots] = 0
    total = (torch.stack(starts) * dstarts).sum() + (torch.stack(finals)[exits] * dfinal).sum()
    total = total + 0 * sum(x.sum() for x in exact)
    want = torch.autograd.grad(total, exact)
    for given_final in (dfinal, None):
        if given_final is None and with_states:
            continue
        dends, dinitial = gradients_of_ends(
            tables,
            schedule,
            dstarts.to(DEVICE, copy=True),
            transitions.to(DEVICE),
            None if given_final is None else given_final.to(DEVICE),
        )
        assert relative(dends.cpu(), want[0]) < 2e-6
        assert relative(dinitial.cpu(), want[2]) < 2e-6


class SegmentsInTorch:
    """The functions of `flash_qla_rules`, in torch. They return NaN where FlashQLA's kernels
    return what nobody may read."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _walk(self, tables: SegmentTables, tensors: list[torch.Tensor], starts: torch.Tensor):
        """out, and the state each segment ends in."""
        query, key, value, g, beta = tensors
        out, finals = [], []
        rule = delta_rule(self.scale, False)
        bounds = tables.host.start
        for segment in range(tables.host.num_segments):
            state = starts[segment][None]
            for first in range(bounds[segment], bounds[segment + 1], CHUNK):
                t = slice(first, min(first + CHUNK, bounds[segment + 1]))
                part, state = rule(state, *(x[None, t] for x in (query, key, value, g, beta)))
                out.append(part[0])
            finals.append(state[0])
        return torch.cat(out), torch.stack(finals)

    def _unsummed(self, summed: torch.Tensor, tables: SegmentTables) -> torch.Tensor:
        """g, of what `solve` summed along chunks."""
        previous = torch.cat([torch.zeros_like(summed[:1]), summed[:-1]])
        bounds = tables.host.start
        for segment in range(tables.host.num_segments):
            previous[bounds[segment] : bounds[segment + 1] : CHUNK] = 0
        return summed - previous

    def _zeros(self, tables: SegmentTables, value: torch.Tensor, key_dim: int) -> torch.Tensor:
        _, heads, value_dim = value.shape
        return value.new_zeros(tables.host.num_segments, heads, key_dim, value_dim)

    def solve(self, key, g, beta, tables):
        summed = g.clone()
        bounds = tables.host.start
        for segment in range(tables.host.num_segments):
            for first in range(bounds[segment], bounds[segment + 1], CHUNK):
                t = slice(first, min(first + CHUNK, bounds[segment + 1]))
                summed[t] = g[t].cumsum(0)
        return summed, torch.full((*beta.shape, CHUNK), torch.nan)

    def sequences_forward(self, query, key, value, g, beta, tables, scale):
        self.calls.append("sequences")
        assert not tables.host.has_children.any()
        summed, solved = self.solve(key, g, beta, tables)
        self.scale = scale
        starts = self._zeros(tables, value, key.shape[2])
        return self._walk(tables, [query, key, value, g, beta], starts)[0], summed, solved

    def ends(self, key, value, summed, beta, solved, tables):
        self.scale = 1.0
        g = self._unsummed(summed, tables)
        zeros = self._zeros(tables, value, key.shape[2])

        def final(starts: torch.Tensor) -> torch.Tensor:
            return self._walk(tables, [key, key, value, g, beta], starts)[1]

        at_zero = final(zeros)
        transitions = zeros.new_empty(*zeros.shape[:3], key.shape[2])
        for column in range(key.shape[2]):
            unit = zeros.clone()
            unit[:, :, column] = 1
            # the same for every column of the state
            transitions[..., column] = (final(unit) - at_zero)[..., 0]
        leaves = torch.from_numpy(~tables.host.has_children)
        at_zero[leaves], transitions[leaves] = torch.nan, torch.nan
        return at_zero, transitions

    def outputs(self, query, key, value, summed, beta, solved, starts, tables, scale):
        self.calls.append("branches")
        self.scale = scale
        g = self._unsummed(summed, tables)
        return self._walk(tables, [query, key, value, g, beta], starts)[0]

    def _gradients(self, inputs, starts, dout, dends, tables):
        leaves = [x.detach().clone().requires_grad_() for x in (*inputs, starts)]
        with torch.enable_grad():
            out, finals = self._walk(tables, leaves[:-1], leaves[-1])
            total = (out * dout).sum() + (finals * dends).sum()
        return list(torch.autograd.grad(total, leaves))

    def gradients_of_starts(self, query, key, summed, beta, solved, dout, tables, scale):
        self.scale = scale
        g = self._unsummed(summed, tables)
        value = torch.zeros_like(dout)
        starts = self._zeros(tables, value, key.shape[2])
        inputs = [query, key, value, g, beta]
        found = self._gradients(inputs, starts, dout, torch.zeros_like(starts), tables)[-1]
        found[tables.schedule(CHUNK).parent_state < 0] = 0
        return found

    def states(self, key, value, summed, beta, solved, starts, tables):
        # those before each segment's first chunk are enough for the walk below
        return starts.clone()

    def gradients(
        self, query, key, value, summed, beta, solved, dout, states, dends, tables, scale
    ):
        self.scale = scale
        g = self._unsummed(summed, tables)
        found = self._gradients([query, key, value, g, beta], states, dout, dends, tables)[:-1]
        # as the kernel leaves it
        dends.fill_(torch.nan)
        return found

    def sequences_gradients(self, query, key, value, summed, beta, solved, dout, tables, scale):
        zeros = self._zeros(tables, value, key.shape[2])
        return self.gradients(
            query, key, value, summed, beta, solved, dout, zeros, zeros.clone(), tables, scale
        )


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SegmentsInTorch]:
    found = SegmentsInTorch()
    name = f"{flash_qla.__package__}.flash_qla_rules"
    monkeypatch.setitem(sys.modules, name, found)  # type: ignore[arg-type]
    monkeypatch.setattr(sys.modules[flash_qla.__package__], "flash_qla_rules", found, raising=False)
    # forests of tests have short segments
    monkeypatch.setattr(flash_qla, "LEAST_TOKENS", 0)
    yield found


def call_of(mask: TreeMask) -> DeltaCall:
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(mask.num_tokens, *shape, generator=draw)

    unit = torch.nn.functional.normalize
    return DeltaCall(
        query=normal(1, DIM),
        key=unit(normal(1, DIM), dim=-1),
        value=normal(HEADS, DIM),
        g=-0.3 * normal(HEADS).abs(),
        beta=normal(HEADS).sigmoid(),
        initial=None,
        mask=mask.host,
        scale=0.7,
        qk_l2norm=False,
    )


def reference_of(call: DeltaCall, dout: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """out and gradients, token by token in float64."""
    from prefixtree.kernels.recurrence import reference

    exact = call._replace(
        **{n: x.double() for n, x in call._asdict().items() if isinstance(x, torch.Tensor)}
    )
    out, saved, _ = reference.forward(exact)
    return out, reference.backward(exact, dout.double(), saved)


@IN_TORCH
@pytest.mark.parametrize("num_parts", mostly([2, 5], [5]))
def test_parts_are_the_whole_forest(rules: SegmentsInTorch, num_parts: int) -> None:
    """States that leave one part enter the next, and their gradients come back."""
    packed = pack(forest_of("caterpillar"))
    call = call_of(packed.mask)
    dout = torch.randn_like(call.value)
    want, want_grads = reference_of(call, dout)
    owner = np.arange(packed.num_tokens) * num_parts // packed.num_tokens
    behind: dict[int, torch.Tensor] = {}
    parts = []
    for part in Steps(packed, owner, num_parts):
        states = PartStates(part)
        entering = [behind[token] for token in states.entered.tolist()]
        tensors = {n: x[part.own_tokens] for n, x in call._asdict().items() if n in NAMES}
        mine = call._replace(
            **tensors,
            initial=torch.stack(entering) if entering else None,
            mask=states.borders.host,
            num_final=len(states.left),
        )
        out, saved, final = flash_qla.forward(mine)
        assert relative(out, want[part.own_tokens]) < 2e-6
        behind.update(zip(states.left.tolist(), final, strict=True))
        parts.append((part.own_tokens, states, mine, saved))
    returned = {token: torch.zeros_like(state) for token, state in behind.items()}
    for own, states, mine, saved in reversed(parts):
        given = [returned[token] for token in states.left.tolist()]
        dfinal = torch.stack(given) if given else None
        grads = flash_qla.backward(mine, dout[own], saved, dfinal)
        for x, y in zip(grads, want_grads, strict=False):
            assert relative(x, y[own]) < 1e-5
        for row, token in enumerate(states.entered.tolist()):
            returned[token] += grads[-1][row]
    assert len(behind) >= num_parts - 1 and "sequences" not in rules.calls


@IN_TORCH
@pytest.mark.parametrize("name", mostly(PACKED, ["chain", "caterpillar", "many roots"]))
def test_forests_with_and_without_branches(name: str, rules: SegmentsInTorch) -> None:
    mask = mask_of(forest_of(name))
    call = call_of(mask)
    dout = torch.randn_like(call.value)
    out, saved, _ = flash_qla.forward(call)
    assert [(x.shape, x.dtype) for x in saved] == [
        (x.shape, x.dtype) for x in flash_qla.saves(call)
    ]
    grads = flash_qla.backward(call, dout, saved)
    branches = segments_of(mask.host).num_states > 0
    assert rules.calls == ["branches" if branches else "sequences"]
    want, want_grads = reference_of(call, dout)
    assert relative(out, want) < 2e-6
    for x, y in zip(grads, want_grads, strict=True):
        assert relative(x, y) < 5e-6


@IN_TORCH
def test_states_that_hand_nothing_up_are_missed(
    rules: SegmentsInTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of(mask_of(forest_of("caterpillar")))
    dout = torch.randn_like(call.value)
    _, saved, _ = flash_qla.forward(call)
    full = flash_qla.backward(call, dout, saved)
    monkeypatch.setattr(flash_qla, "gradients_of_ends", lambda *given: (given[2].zero_(), None))
    cut = flash_qla.backward(call, dout, saved)
    assert all(relative(x, y) > 0.05 for x, y in zip(cut[1:], full[1:], strict=True))


@IN_TORCH
def test_short_segments_run_through_fla(
    rules: SegmentsInTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both directions, by the same rule, and what one saves the other reads."""
    call = call_of(mask_of(forest_of("star")))
    tokens, segments = call.mask.num_tokens, segments_of(call.mask).num_segments
    assert [(x.shape, x.dtype) for x in flash_qla.fla.saves(call)] == [
        (x.shape, x.dtype) for x in flash_qla.saves(call)
    ]
    monkeypatch.setattr(flash_qla.fla, "forward", lambda *_: "forward of fla")
    monkeypatch.setattr(flash_qla.fla, "backward", lambda *_: "backward of fla")
    monkeypatch.setattr(flash_qla, "LEAST_TOKENS", tokens // segments + 1)
    assert flash_qla.forward(call) == "forward of fla"
    assert flash_qla.backward(call, call.value, []) == "backward of fla"
    monkeypatch.setattr(flash_qla, "LEAST_TOKENS", tokens // segments)
    flash_qla.forward(call)
    assert rules.calls == ["branches"]


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(mask_of(forest_of("chain")))
    assert flash_qla.refusal(call._replace(g=torch.zeros(150, HEADS, DIM))) == (
        "it serves the gated delta rule with one gate per head"
    )
    # where fla could serve a call, head dims, the switch and the release decide
    monkeypatch.setattr(flash_qla.fla, "refusal", lambda _: None)
    monkeypatch.setattr(flash_qla.runtime, "capability", lambda _: (9, 0))
    assert flash_qla.refusal(call) == "head dims must be 128 and 128, and are 16 and 16"
    wide = torch.zeros(150, 1, 128)
    call = call._replace(query=wide, key=wide, value=wide)
    flash_qla._package_refusal.cache_clear()
    try:
        monkeypatch.setattr(flash_qla, "version", lambda _: "0.9.9")
        assert flash_qla.refusal(call) == "it works with flash-qla 0.1.3, and 0.9.9 is installed"
    finally:
        flash_qla._package_refusal.cache_clear()
    monkeypatch.setenv(flash_qla.SWITCH, "0")
    assert flash_qla.refusal(call) == "FLA_FLASH_QLA=0 switches it off"
    monkeypatch.delenv(flash_qla.SWITCH)
    monkeypatch.setattr(flash_qla.runtime, "capability", lambda _: (10, 0))
    assert "verified on Hopper" in str(flash_qla.refusal(call))
