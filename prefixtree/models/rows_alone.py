"""A probe of whether the layers of a model treat every token alone: a few tokens, once per model.

A packed row has other neighbours and other places than a sequence alone. Code that looks along the
row (a hook on the tokens after a prompt, a convolution, one scale for all activations) gives other
results without an error. So a model reads sequences of one token, in two orders and among different
tokens, and what its layers give a token must stay the same. Code of no known package is named in a
warning too. Legend: N tokens of the probe, K of them that two rows hold, D numbers of an output.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from prefixtree.errors import UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.models.changes import asks_for_gradients, changing
from prefixtree.models.checks import KNOWN_PACKAGES, every_layer_attends, foreign_module
from prefixtree.models.families import family_of, forward_inputs, router_keywords
from prefixtree.models.layers import decoder_of
from prefixtree.packing.layout import pack

_TOKENS = 64
# distinct tokens of the third row
_FEW = 4
# the number of differing tokens of both orders that cannot be near ties of a router
_MANY = 1 / 4
# the rounding of a token's output, by norm: one step of a short dtype, and more than kernels for
# other numbers of rows differ in float32
_FLOAT32_ROUNDING = 1e-4
# an error that grows by less than this in one module came from earlier modules
_GROWTH = 8
# code that trainers put into models is tested with their adapters; "?" are forwards along the tree
_KNOWN = (
    *KNOWN_PACKAGES,
    *("deepspeed", "torchao", "bitsandbytes", "fla", "kernels", "verl", "swift", "skyrl"),
    *("openrlhf", "lightning", "wandb", "?"),
)
# larger buffers are weights
_SMALL_BUFFER = 2**20


class _Probed:
    """The states of a model that were probed, and whether it was warned of."""

    def __init__(self) -> None:
        self.states: set[int] = set()
        self.warned = False


_probed: weakref.WeakKeyDictionary[nn.Module, _Probed] = weakref.WeakKeyDictionary()


def check_layers(model: nn.Module, transformer: Any, device: torch.device) -> None:
    """Refuses layers that give a token something else among others, and warns of unknown code.

    It runs once, and again when hooks, forwards, classes or the training mode changed. All ranks
    that share a model run equally many forwards: a later change of a sharded one is not probed, as
    it may have happened on one rank.

    Args:
        device: the device of the model's inputs.
    """
    known = _probed.setdefault(transformer, _Probed())
    state = state_of(transformer)
    if state in known.states:
        return
    foreign = foreign_code(transformer)
    sharded = is_sharded(model)
    mode = hash(("sharded", transformer.training))
    difference = None
    if not (sharded and mode in known.states) and device.type != "meta":
        difference = _difference(model, transformer, device)
    if difference is not None:
        _refuse(transformer, difference, foreign)
    if foreign and not known.warned:
        known.warned = True
        warnings.warn(_warning(transformer, foreign), stacklevel=5)
    known.states |= {state, mode}


def state_of(transformer: nn.Module) -> int:
    """A number that changes with the modules, hooks, forwards, classes and modes of a model."""
    parts: list[Any] = []
    kinds, pending = dict[Any, None](), [transformer]
    while pending:
        module = pending.pop()
        held = module.__dict__
        kinds[type(module)] = None
        parts.append(type(module))
        if held["training"]:
            parts.append(True)
        if hooks := held["_forward_pre_hooks"]:
            parts += hooks
        if hooks := held["_forward_hooks"]:
            parts += [number for number, hook in hooks.items() if not asks_for_gradients(hook)]
        if "forward" in held:
            parts.append(id(held["forward"]))
        if children := held.get("_modules"):
            pending += [child for child in children.values() if child is not None]
    parts += [id(kind.forward) for kind in kinds]
    return hash(tuple(parts))


def foreign_code(transformer: Any) -> list[str]:
    """Names the hooks, forwards and classes below a model that are of no known package."""
    known: tuple[str, ...] = _KNOWN
    if not is_tested(transformer):
        # the layers of a type that the user allowed are the user's to check
        known = *known, type(transformer).__module__
    foreign = []

    def note(what: str, where: str, function: Any) -> None:
        if (origin := foreign_module(function, known)) is not None:
            function = getattr(function, "__func__", function)
            name = getattr(function, "__qualname__", type(function).__name__)
            foreign.append(f"{what} {where} ({name} of {origin})")

    # these are looked at in every call
    head = transformer.get_output_embeddings()
    seen = set[nn.Module | type]([transformer, *([] if head is None else head.modules())])
    for name, module in transformer.named_modules():
        if module in seen:
            continue
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            note("a hook on", name, hook)
        module_class = type(module)
        if "forward" in vars(module):
            note("the forward of", name, module.forward)
        elif module_class not in seen:
            seen.add(module_class)
            note(f"the forward of class {module_class.__name__},", name, module_class.forward)
    return foreign


def is_tested(transformer: Any) -> bool:
    """Whether a model type is listed, and not only allowed by the user."""
    config = transformer.config
    return all(family_of(c).is_tested for c in (config, config.get_text_config()))


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks wait for one another in a forward: FSDP, ZeRO-3, tensor or expert parallel."""
    # FSDP2 may leave whole parameters in the place of shards between two forwards
    wrappers = FSDPModule, FullyShardedDataParallel
    return any(
        isinstance(m, wrappers) or vars(m).get("_is_hooked") for m in model.modules()
    ) or any(hasattr(p, "placements") or "ds_id" in vars(p) for p in model.parameters())


# ---- words ---------------------------------------------------------------------------------------


class _Difference(NamedTuple):
    """The first module whose outputs differ: name, class, and the difference over the norm."""

    name: str
    kind: str
    size: float


def _named(foreign: list[str]) -> str:
    more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
    return ", ".join(foreign[:3]) + more


def _refuse(transformer: Any, found: _Difference, foreign: list[str]) -> None:
    holds = f" (the model holds {_named(foreign)})" if foreign else ""
    message = (
        f"{found.name} ({found.kind}) gives a token another output, by {found.size:.1%} of its "
        "norm, when other tokens stand beside it or when its place in the row is another, as in a "
        f"packed forest{holds}; remove what does so while scoring (a hook or a patch, there or "
        "before it), or make it treat every token alone, by position_ids and not by place"
    )
    if is_tested(transformer):
        raise UnsupportedError(message)
    warnings.warn(f"{message} (model type allowed by allow_model_type)", stacklevel=6)


def _warning(transformer: Any, foreign: list[str]) -> str:
    return (
        f"{type(transformer).__name__} holds code that prefixtree does not know: {_named(foreign)}."
        " In a packed forest a token has other neighbours and another place in the row than in its"
        " sequence. A hook that only reads changes nothing, and sees every distinct token once;"
        " what changes outputs must treat every token alone. A probe of a few tokens saw no"
        " difference, but it does not see everything: prefixtree.verify(model, sequences) compares"
        " whole sequences"
    )


# ---- the probe -----------------------------------------------------------------------------------


def _difference(model: nn.Module, transformer: Any, device: torch.device) -> _Difference | None:
    """Finds the first module that gives a token something else in another row.

    It gives None where there is none, or where the model does not run: the forward itself will
    tell.
    """
    while True:
        # DDP would send buffers, and compiled code would be compiled for the probe
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := vars(model).get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            break
    try:
        rows = _Rows.of(transformer.config)
        with _left_as_it_was(transformer, device):
            runs = [
                _outputs(model, transformer, tokens, device)
                for tokens in (rows.first, rows.second, rows.few)
            ]
            return _compare(runs, rows, transformer)
    except Exception:
        return None


class _Rows(NamedTuple):
    """Three rows int64 [N]: tokens, most of them in another order, and a few, each many times.

    The third row has few tokens because one scale for all is the largest token's, which most rows
    would share.

    Attributes:
        in_first, in_second: int64 [K], the places of the tokens that the first two rows hold.
        which: int64 [N], the place in the first row of the tokens of the third, below `_FEW`.
    """

    first: np.ndarray
    second: np.ndarray
    few: np.ndarray
    in_first: np.ndarray
    in_second: np.ndarray
    which: np.ndarray

    @classmethod
    def of(cls, config: Any) -> _Rows:
        """Makes rows of text tokens spread over the vocabulary, the same on all ranks."""
        rng = np.random.default_rng(0)
        size = config.get_text_config().vocab_size
        special = _special_tokens(config) | _special_tokens(config.get_text_config())
        # a permutation of a large vocabulary takes long
        drawn = rng.permutation(min(size, 4 * _TOKENS)) * (size // min(size, 4 * _TOKENS))
        usable = [t for t in drawn.tolist() if t not in special] or [0]
        first, others = np.resize(usable, 2 * _TOKENS).reshape(2, -1)
        order = rng.permutation(_TOKENS)
        replaced = np.arange(_TOKENS) % 4 == 1
        second = np.where(replaced, others, first[order])
        kept = np.flatnonzero(~replaced)
        # half of them are one token, which no expert has room for where there is a capacity
        which = rng.permutation(_TOKENS)
        which = np.where(which < _TOKENS // 2, 0, which % _FEW)
        return cls(first, second, first[which], order[kept], kept, which)


def _special_tokens(config: Any) -> set[int]:
    """Padding, placeholders of images and others that models may treat apart."""
    found = [v for n, v in vars(config).items() if n.endswith(("token_id", "token_index"))]
    return {t for v in found for t in (v if isinstance(v, list) else [v]) if isinstance(t, int)}


@contextlib.contextmanager
def _left_as_it_was(transformer: nn.Module, device: torch.device) -> Iterator[None]:
    """A context without gradients, compilation or checkpoints that restores all state of a model.

    Random numbers, buffers and counters of modules are restored.
    """
    modules = list(transformer.modules())
    buffers = [(b, b.clone()) for b in _small_buffers(transformer)]
    numbers = [(vars(module), _numbers_of(module)) for module in modules]
    devices = [device] if device.type == "cuda" else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices))
        changes = stack.enter_context(changing(transformer))
        for module in modules:
            if vars(module).get("gradient_checkpointing"):
                changes.set(module, gradient_checkpointing=False)
            # not torch's stance, which an interrupt at the wrong line would leave
            if vars(module).get("_compiled_call_impl") is not None:
                changes.set(module, _compiled_call_impl=None)
        try:
            yield
        finally:
            # casts of weights that were made without gradients would lose them in the forward
            torch.clear_autocast_cache()
            for buffer, copy in buffers:
                # batch norms leave versions as they are
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)
            for held, values in numbers:
                held.update({k: v for k, v in values.items() if held.get(k) is not v})


def _numbers_of(module: nn.Module) -> dict[str, float]:
    """The counters and other numbers of a module, without DeepSpeed's, which count its forwards."""
    found = {k: v for k, v in vars(module).items() if isinstance(v, (int, float))}
    return {k: v for k, v in found.items() if not k.startswith(("_", "ds_"))}


def _small_buffers(transformer: nn.Module) -> list[torch.Tensor]:
    return [
        b
        for b in transformer.buffers()
        if b.numel() <= _SMALL_BUFFER and not b.is_meta and not b.is_inference()
    ]


_Output = tuple[str, nn.Module, torch.Tensor]


def _outputs(
    model: nn.Module, transformer: Any, tokens: np.ndarray, device: torch.device
) -> list[_Output]:
    """Runs N tokens, each a sequence: the outputs of modules in the order of calls, [N, D] each."""
    alone = np.full(_TOKENS, -1), np.ones(_TOKENS, int), tokens
    packed = pack(PrefixForest.from_parents(*alone, order="input"))
    if device.type == "cuda":
        # a token that sees itself alone gets its value by any kernel; none is compiled for this
        packed = packed.with_options("reference")
    packed = packed.to(device)
    inputs = forward_inputs(packed, transformer) | router_keywords(transformer.config, False)
    head = transformer.get_output_embeddings()
    if head is not None:
        inputs["logits_to_keep"] = torch.arange(_TOKENS, device=device)
    outputs: list[_Output] = []
    thread = threading.get_ident()

    def note(name: str, module: nn.Module, output: Any) -> None:
        rows = _rows_of(output)
        if rows is not None and threading.get_ident() == thread:
            # a later module may write into it
            outputs.append((name, module, rows.detach().clone()))

    with changing(transformer) as changes:
        for name, module in _watched(transformer):

            def keep(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                note(name, module, output)

            changes.hook(module.register_forward_hook, keep)
        if head is not None:
            forward = head.forward

            def no_logits(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                if threading.get_ident() != thread:
                    return forward(hidden, *args, **kwargs)
                note("the input of the output embedding", head, hidden)
                # the family's forward treats it as logits
                return hidden[..., :1].clone()

            changes.set(head, forward=torch.compiler.disable(no_logits))
        with every_layer_attends(transformer, packed.mask):
            model(**inputs)
    return outputs


def _watched(transformer: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yields the decoder, its parts, its layers and their parts: names and modules."""
    decoder = decoder_of(transformer)
    names = {module: name for name, module in transformer.named_modules()}
    pending = [(decoder, 0)]
    if transformer.base_model is not decoder:
        pending.append((transformer.base_model, 2))
    while pending:
        module, depth = pending.pop()
        is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if not is_list:
            yield names[module] or type(module).__name__, module
        if depth < 2 or is_list:
            pending += [(child, depth + (not is_list)) for child in module.children()]


def _rows_of(output: Any) -> torch.Tensor | None:
    """The rows [N, D] of a module's output; None where it has no row per token."""
    output = getattr(output, "last_hidden_state", output)
    if isinstance(output, tuple) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return None
    if hasattr(output, "placements"):
        return None
    if output.ndim > 2 and output.shape[:2] == (1, _TOKENS):
        return output.reshape(_TOKENS, -1)
    if output.ndim == 2 and len(output) == _TOKENS:
        return output
    return None


def _compare(runs: list[list[_Output]], rows: _Rows, transformer: nn.Module) -> _Difference | None:
    """Finds the first module whose outputs differ by more than rounding where earlier ones did not.

    It counts if many tokens differ at once, or all of the few of the third row, or one whose place
    differs among equal tokens of that row: one alone may be the near tie of a router.
    """
    shared = min(map(len, runs))
    which, few = torch.from_numpy(rows.which), torch.arange(_FEW)
    # one place in the third row for each token there
    reference = torch.from_numpy(np.array([np.flatnonzero(rows.which == t)[1] for t in few]))
    apart: list[list[torch.Tensor]] = []
    for outputs in zip(*(run[:shared] for run in runs), strict=True):
        first, second, third = (rows_of.float() for _, _, rows_of in outputs)
        pairs = (
            (first[rows.in_first], second[rows.in_second]),
            (first[:_FEW], third[reference]),
            (third[reference[which]], third),
        )
        apart.append([_apart(x, y) for x, y in pairs])
    if not apart:
        return None
    # waits for the device once
    lengths = [len(x) for x in apart[0]]
    numbers = torch.stack([torch.cat(of_module) for of_module in apart]).cpu()
    in_first, in_second = map(torch.from_numpy, (rows.in_first, rows.in_second))
    among, alone = _Growing(lengths[0]), _Growing(lengths[1])
    for index, (name, module, output) in enumerate(runs[0][:shared]):
        if not all(run[index][0] == name for run in runs):
            break
        rounding = _rounding(output, module, transformer)
        of_tokens, of_few, of_places = numbers[index].split(lengths)
        outliers = of_places > rounding
        for token in range(_FEW):
            # the reference may be the one place that differs
            if outliers[which == token].float().mean() > 1 / 2:
                outliers[which == token] ^= True
        new, new_few = among.new(of_tokens, rounding), alone.new(of_few, rounding)
        at_outliers = new & (outliers[in_first] | outliers[in_second])
        if new.float().mean() > _MANY or bool(new_few.all()) or bool(at_outliers.any()):
            size = max(float(x.max()) for x in (of_tokens[new], of_few[new_few]) if len(x))
            return _Difference(name, type(module).__name__, size)
    return None


class _Growing:
    """Tells, from module to module, for which tokens it is the first that differs."""

    def __init__(self, count: int) -> None:
        self._before = torch.zeros(count)
        self._differed = torch.zeros(count, dtype=torch.bool)

    def new(self, now: torch.Tensor, rounding: float) -> torch.Tensor:
        """Marks differences [count] that are new, bool [count]; called in the order of modules."""
        new = ~self._differed & (now > rounding) & (now > _GROWTH * self._before)
        self._differed |= now > rounding
        self._before = now
        return new


def _apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The distance of rows by norm, [K]; 0 where one is not finite, which scores will show."""
    norms = a.norm(dim=1)
    scale = torch.maximum(norms, norms.nanmedian() / 10).clamp_min(torch.finfo(a.dtype).tiny)
    return ((a - b).norm(dim=1) / scale).nan_to_num(0.0, posinf=0.0)


def _rounding(output: torch.Tensor, module: nn.Module, transformer: nn.Module) -> float:
    """The share of their norm by which rounding may change a module's outputs."""
    dtypes = {output.dtype, next(transformer.parameters()).dtype}
    dtypes |= {p.dtype for p in module.parameters()}
    device_type = output.device.type
    if torch.is_autocast_enabled(device_type):
        dtypes.add(torch.get_autocast_dtype(device_type))
    short = [torch.finfo(d).eps for d in (torch.float16, torch.bfloat16) if d in dtypes]
    return max([_FLOAT32_ROUNDING, *short])
