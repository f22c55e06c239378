"""Which backend serves a recurrent layer, and what `explain_recurrence` and the warning say."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch

from prefixtree.kernels import runtime
from prefixtree.kernels.recurrence import backends, conv_triton, explain_recurrence, fla
from prefixtree.kernels.recurrence.backends import OPERATORS, explanation
from prefixtree.kernels.recurrence.protocol import Call, ConvCall, DeltaCall, SsdCall
from tests.support.recurrence_cases import forest_of
from tests.support.strategies import mask_of


class OnGpu(torch.Tensor):
    """Seems to be on a GPU."""

    is_cuda = True


def call_of(operator: str, dtype: torch.dtype = torch.bfloat16, dim: int = 128) -> Call:
    def rows(*shape: int) -> torch.Tensor:
        return torch.zeros((), dtype=dtype).expand(8, *shape).as_subclass(OnGpu)

    x, gate = rows(1, dim), rows(1)
    if operator == "tree_conv":
        return ConvCall(rows(dim), rows(dim)[:, :4], None, None, True)
    if operator == "tree_ssd":
        return SsdCall(x, gate, gate[0], x, x, None, None)
    return DeltaCall(x, x, x, gate, gate, None, None, 1.0, True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU with fla-core, whose gated backward is not refused."""
    monkeypatch.setattr(runtime, "capability", lambda _: (9, 0))
    for name in ("_package_refusal", "_gate_refusal"):
        monkeypatch.setattr(fla, name, lambda: None)
    return monkeypatch


@pytest.mark.parametrize("operator", OPERATORS)
def test_on_a_cpu_and_by_name(operator: str) -> None:
    mask = mask_of(forest_of("star"))
    assert explain_recurrence(mask, operator) == (
        f"{operator} would run 'chunked': the mask is on cpu, and the other backends need a GPU."
    )
    asked = explain_recurrence(mask, operator, backend="reference")
    assert asked == f"{operator} would run 'reference': it was asked for by name."
    refused = explain_recurrence(mask, operator, backend="magic")
    assert refused.startswith(f"{operator} would refuse: backend 'magic' does not exist")
    other = "fla" if operator == "tree_conv" else "triton"
    said = explain_recurrence(mask, operator, backend=other)
    assert said.startswith(f"{operator} would refuse: backend {other!r}: it has ")


def test_arguments_that_do_not_fit() -> None:
    mask = mask_of(forest_of("star"))
    with pytest.raises(ValueError, match="one of tree_conv, tree_delta_rule, tree_ssd, got 'gru'"):
        explain_recurrence(mask, "gru")
    wrong: Any = mask.subtree_end
    with pytest.raises(TypeError, match="must be a TreeMask"):
        explain_recurrence(wrong)


@pytest.mark.parametrize("operator", OPERATORS)
def test_on_a_gpu(operator: str, gpu: pytest.MonkeyPatch) -> None:
    name = "triton" if operator == "tree_conv" else "fla"
    said = explanation(operator, call_of(operator), "auto")
    assert said == f"{operator} would run {name!r}: it serves this call."
    # no other backend than the one that has the operator is blamed
    said = explanation(operator, call_of(operator, torch.float64), "auto")
    assert said.startswith(f"{operator} would run 'chunked': backend {name!r}: it computes in ")
    assert said.count("backend") == 1


def test_head_dims_that_fla_does_not_take(gpu: pytest.MonkeyPatch) -> None:
    said = explanation("tree_ssd", call_of("tree_ssd", dim=8), "auto")
    assert "'chunked': backend 'fla': head dims must be 16 to 256, and are 8 and 8" in said


@pytest.mark.parametrize("operator", ["tree_delta_rule", "tree_ssd"])
def test_without_fla_core_one_warning_names_it(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(runtime, "capability", lambda _: (9, 0))
    monkeypatch.setattr(fla, "version", missing)
    fla._package_refusal.cache_clear()
    backends._warn.cache_clear()
    call = call_of(operator)
    needs = r"fla-core .* is not installed: pip install 'prefixtree-attention\[fla\]'"
    try:
        with pytest.warns(UserWarning, match=f"on this GPU, which is slow: backend .fla.: {needs}"):
            backends.warn_if_slow(call, backends.choose("auto", call))
        with warnings.catch_warnings(action="error"):
            backends.warn_if_slow(call, backends.choose("auto", call))
        assert explanation(operator, call, "auto").startswith(f"{operator} would run 'chunked': ")
        # other reasons are not mended by a package
        wide = call_of(operator, torch.float64)
        with pytest.warns(UserWarning, match="computes in float16 and bfloat16") as said:
            backends.warn_if_slow(wide, backends.choose("auto", wide))
        assert "fla-core" not in str(said[0].message)
    finally:
        fla._package_refusal.cache_clear()
        backends._warn.cache_clear()


def test_another_version_of_fla_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "capability", lambda _: (9, 0))
    monkeypatch.setattr(fla, "version", lambda _: "0.5.0")
    fla._package_refusal.cache_clear()
    said = explanation("tree_ssd", call_of("tree_ssd"), "auto")
    fla._package_refusal.cache_clear()
    assert "'chunked': backend 'fla': it works with fla-core 0.6.0, and 0.5.0 is installed" in said


def test_gates_that_triton_miscompiles(gpu: pytest.MonkeyPatch) -> None:
    """A gate per head is refused, one per channel is not."""
    gpu.setattr(fla, "_gate_refusal", lambda: "Triton 3.6.0 miscompiles it; install tilelang")
    call = call_of("tree_delta_rule")
    assert isinstance(call, DeltaCall)
    said = explanation("tree_delta_rule", call, "auto")
    assert said.endswith("'chunked': backend 'fla': Triton 3.6.0 miscompiles it; install tilelang.")
    channels = call._replace(g=call.key)
    assert "would run 'fla'" in explanation("tree_delta_rule", channels, "auto")


def test_the_convolution_takes_so_many_taps(gpu: pytest.MonkeyPatch) -> None:
    call = call_of("tree_conv")
    assert isinstance(call, ConvCall)
    many = call._replace(weight=call.weight.repeat(1, 2))
    said = explanation("tree_conv", many, "auto")
    assert f"'chunked': backend 'triton': it takes at most {conv_triton._MOST_TAPS} taps" in said
