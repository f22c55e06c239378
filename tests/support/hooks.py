"""What tests change inside of the package, by plain names: the one file that knows private ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import reduce, wraps
from importlib import import_module
from typing import Any

import pytest
import torch

import prefixtree
from prefixtree.planning.part_states import KEYS

# Names below `prefixtree`, imported as they are used. `tools/reach.py` follows none of them: a test
# runs what it changes, and so reaches it without them.

#: Limits: a small input takes the path of a large one.
LIMITS = {
    "budget of a small trunk": "planning.trunks:_LEAST",
    "chunks of a split": "planning.split:_CHUNKS",
    "gradients of copies": "packing.copies:_CHUNK",
    "kept of a sampler": "sampling.kept_sampler:_MOST",
    "keys gathered in a cascade": "kernels.decoding.cascade:_GATHERED",
    "latents by definition": "kernels.latents.definition:_GATHERED",
    "latents' lists of keys": "kernels.latents.gathered:_LISTED",
    "latents' queries": "kernels.latents.gathered:_CHUNK",
    "logits in a measure": "kernels.lm_head.measures:_BLOCK",
    "logits in statistics": "kernels.lm_head.eager:_BLOCK",
    "left free by probes": "recompute.choose:_OF_PROBES",
    "logits of plans": "recompute.plan:_LOGITS",
    "logits of rows": "testing.compare:_CPU_CHUNK",
    "logits": "kernels.lm_head.logprobs:_CPU_CHUNK",
    "most parts of a convolution": "kernels.recurrence.conv_triton:_MOST_PARTS",
    "rows drawn at once": "sampling.draws:_AT_ONCE",
    "rows that fill a batch": "sampling.rows:_STILL_FULL",
    "runs of images": "recompute.image_work:_LEAST_RUN",
    "scores of an indexer": "sparse.indexers:_SCORES",
    "scores of eager by rows": "testing.reference:_CPU_SCORES",
    "scores of sdpa": "kernels.attention.sdpa:_CHUNK",
    "sliced runs": "packing.copies:_MOST_RUNS",
    "steps between looks": "sampling.rows:_LOOK_EVERY",
    "tokens of a small trunk": "planning.trunks:_FEW",
    "tokens read at once": "sampling.rows:_READ_AT_ONCE",
}
#: Calls: tests count them, change what they give, or leave them out.
CALLS = {
    "a rank's A, D and dt_bias": "parallel.heads:TokensForHeads.of_rank",
    "backward of imported states": "parallel.states:_Exported.backward",
    "backward of gathered rows": "parallel.ranks:_GatherRows.backward",
    "backward of parts": "parallel.run:_backward",
    "backward of images' rows": "images.exchange:_ExchangeRows.backward",
    "bytes left for activations": "recompute.choose:_left_for_activations",
    "check of positions": "models.attention:_check_position_ids",
    "check of states": "models.checks:_check_states",
    "copies of scores": "scoring.edges:gather",
    "core of TransformerEngine": "integrations.megatron.layers:_transformer_engine_core",
    "entries of compressed keys": "sparse.compressed:_entries",
    "evaluated copy of a policy": "integrations.trl.rollouts:_evaluated",
    "exported rows": "parallel.ledger:Exchange.export",
    "families with grids": "images.inputs:GRIDS",
    "families with positions": "images.inputs:_POSITIONS",
    "features of placements": "images.encodings:Encoding._repeated",
    "gradients in the demo": "demo.training:_gradients",
    "gradients of a trunk's scores": "parallel.run:_sum",
    "gradients of initial states": "kernels.recurrence.chunked:_add_to_entries",
    "gradients of joined rows": "parallel.states:_Joined.backward",
    "gradients of other ranks": "parallel.transport:Transport.back",
    "graphs of steps": "sampling.step:StepGraphs",
    "heads of tokens": "parallel.heads:TokensForHeads.start_to_heads",
    "images of rows": "integrations.trl.data_set_trainers:_pixels_of",
    "imported rows": "parallel.ledger:Exchange.import_rows",
    "joined heads": "parallel.heads:TokensForHeads.joined",
    "joined runs of a vision encoder": "images.encoder:_joined",
    "kernels of an indexer": "sparse.indexers:_kernels_for",
    "kernels of best keys": "kernels.best_keys:_kernels_for",
    "kernels of the head": "kernels.lm_head.logprobs:_kernels_for",
    "key of an image": "images.inputs:image_key",
    "keys that move": "sampling.growing_forest:GrowingForest._move_together",
    "lists of a decode step": "kernels.decoding.work:DecodeWork._fill",
    "mask of dualkv": "integrations.dualkv:_mask",
    "model of a setting": "testing.models:_build",
    "numbers of tokens and choices": "_forest_inputs:numbers_of",
    "output of verl's engine": "integrations.verl.engine:PackedActorEngine._model_output",
    "plan of auto": "recompute.choose:_auto",
    "plan of parts": "recompute.trunk_modes:_planned",
    "positions of images": "images.vision:_position_ids",
    "probe of layers": "models.rows_alone:_difference",
    "product of patches": "images.encoder:_product",
    "ranks in lockstep": "images.vision:runs_in_lockstep",
    "replay in routers": "experts.routers:_prepare",
    "returned gradients of rows": "parallel.ledger:Exchange.give_back",
    "rotary table": "integrations.megatron.layers:_AtDepths.__call__",
    "scores of a router": "integrations.megatron.routers:ForestRouter._weighed",
    "sum of a state's copies": "parallel.heads:_sum_of_copies",
    "taken gradients of rows": "parallel.ledger:Exchange.take",
    "verify's run": "testing.verify:_run_all",
    "version of transformers for routes": "experts.routers:_TRANSFORMERS",
    "warning of no backward": "parallel.run:_warn_of_no_backward",
    "windows of compressed keys": "sparse.compressed:_Windows.of",
    "work of a vision encoder": "recompute.encoder_memory:Products",
}


def place(what: str) -> tuple[Any, str]:
    """The module or class, and the name in it, as `patch.object` takes them."""
    module, _, path = (LIMITS | CALLS)[what].partition(":")
    *inside, name = path.split(".")
    return reduce(getattr, inside, import_module(".".join((prefixtree.__name__, module)))), name


def inner(what: str) -> Any:
    """What is there now."""
    return getattr(*place(what))


def put(monkeypatch: pytest.MonkeyPatch, what: str, value: Any) -> None:
    owner, name = place(what)
    if isinstance(inspect.getattr_static(owner, name), staticmethod):
        value = staticmethod(value)
    monkeypatch.setattr(owner, name, value)


def limit(monkeypatch: pytest.MonkeyPatch, what: str, value: Any) -> None:
    assert what in LIMITS
    put(monkeypatch, what, value)


def wrap(monkeypatch: pytest.MonkeyPatch, what: str, call: Callable[..., Any]) -> None:
    """`call(real, *args, **kwargs)` stands for what is there."""
    real = inner(what)
    put(monkeypatch, what, lambda *args, **kwargs: call(real, *args, **kwargs))


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are not probed: for tests that count forwards, or that see mistakes turn them red."""
    put(monkeypatch, "probe of layers", lambda *_: None)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is probed: for tests of the probe."""
    probe = inner("probe of layers")
    put(monkeypatch, "probe of layers", getattr(probe, "__wrapped__", probe))


_PACKAGES = {"accelerate", "peft", "prefixtree", "torch", "transformers"}
_IMPLEMENTED = "attn", "experts"


def probe_each_kind_once() -> None:
    """Of models with the same code, dtypes and implementations of attention and experts, one is
    probed: tests build thousands. Those with hooks or forwards that tests made always are. Ranks,
    which run the same cases, probe the same models."""
    owner, name = place("probe of layers")
    probe = getattr(owner, name)
    if hasattr(probe, "__wrapped__"):
        return
    passed: set[Any] = set()

    @wraps(probe)
    def once(model: Any, transformer: Any, device: torch.device) -> Any:
        modules = list(transformer.modules())
        added = [(number, *code) for number, m in enumerate(modules) for code in _added(m)]
        if any(package not in _PACKAGES for _, package, _ in added):
            return probe(model, transformer, device)
        configs = transformer.config, transformer.config.get_text_config()
        kind = (
            type(model),
            tuple((type(m), type(m).forward, m.training) for m in modules),
            tuple(added),
            tuple(vars(c).get(f"_{x}_implementation") for c in configs for x in _IMPLEMENTED),
            frozenset((type(p), p.dtype, p.device) for p in transformer.parameters()),
            torch.is_autocast_enabled(device.type),
        )
        if kind in passed:
            return None
        found = probe(model, transformer, device)
        if found is None:
            passed.add(kind)
        return found

    setattr(owner, name, once)


def _added(module: torch.nn.Module) -> list[tuple[str, str]]:
    """The packages and names of its hooks, and of a forward of its own."""
    found = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    found += [vars(module)["forward"]] if "forward" in vars(module) else []
    plain = [inspect.unwrap(getattr(x, "func", x)) for x in found]
    named = [x if hasattr(x, "__qualname__") else type(x) for x in plain]
    return [(str(x.__module__).partition(".")[0], x.__qualname__) for x in named]


# ---- gradients that are lost: what comparisons must notice ---------------------------------------


def lose_copies(monkeypatch: pytest.MonkeyPatch, behind: int = 2) -> None:
    """Of the scores of edges from column `behind` on, the gradient of the first copy stands for the
    sum over all; the values are exact."""

    def gather_alone(gather: Any, values: torch.Tensor, index: Any) -> torch.Tensor:
        scores = gather(values, index)
        _, number = index.rows.unique(return_inverse=True)
        is_first = (number[:, None] == number).float().argmax(1) == torch.arange(len(number))
        measured = scores[:, behind:]
        alone = torch.where(is_first[:, None], measured, measured.detach())
        return torch.cat([scores[:, :behind], alone], 1)

    wrap(monkeypatch, "copies of scores", gather_alone)


def lose_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of imported keys and values."""

    def lost(give_back: Any, exchange: Any, *gradients: torch.Tensor) -> Any:
        if exchange.kind == KEYS:
            exchange.take()
        return give_back(exchange, *gradients)

    wrap(monkeypatch, "returned gradients of rows", lost)


def lose_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of imported states."""

    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        ctx.exchange.take()
        return dout, None, None

    put(monkeypatch, "backward of imported states", backward)


def lose_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the imported tails of convolutions."""

    real = inner("gradients of joined rows")

    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.exchange.take()
        return real(ctx, gradient)

    put(monkeypatch, "gradients of joined rows", backward)


def round_exported(monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    """Sums of gradients of exported rows of a kind are rounded to bfloat16."""

    def rounded(give_back: Any, exchange: Any, *gradients: torch.Tensor) -> Any:
        own = give_back(exchange, *gradients)
        for export in exchange.read:
            for total in export.gradients[exchange.key] if exchange.kind == kind else ():
                assert total.dtype == torch.float32
                total.copy_(total.bfloat16())
        return own

    wrap(monkeypatch, "returned gradients of rows", rounded)


def forget_all_but(monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    """Layers take no gradients of rows that they exported, unless of a kind."""

    def take(real: Any, exchange: Any) -> Any:
        return real(exchange) if exchange.kind == kind else []

    wrap(monkeypatch, "taken gradients of rows", take)


def lose_kept(monkeypatch: pytest.MonkeyPatch, behind: int = 0) -> None:
    """Those of the scores of trunks' edges, of all micro-batches that use them but the first, from
    a column on."""

    def lost(total: Any, before: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(behind, more.shape[-1])
        return total(before, more.index_fill(-1, columns, 0))

    wrap(monkeypatch, "gradients of a trunk's scores", lost)


def own_gradients_alone(of: Callable[[int, int], bool]) -> tuple[Any, str, Any]:
    """Ranks exchange gradients and add none, of some rows; as `patch.object` takes it.

    Args:
        of: whether they are meant, by their kind and the number of tensors that travel together.
    """
    real = inner("gradients of other ranks")

    def back(transport: Any, gradients: Any, in_float32: bool) -> Any:
        held, own, of_ranks = real(transport, gradients, in_float32)
        if of(transport.kind, len(gradients)):
            of_ranks = [tuple(map(torch.zeros_like, pieces)) for pieces in of_ranks]
        return held, own, of_ranks

    return *place("gradients of other ranks"), back


def lose_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of images' features."""
    wrap(monkeypatch, "features of placements", lambda real, *args: real(*args).detach())
