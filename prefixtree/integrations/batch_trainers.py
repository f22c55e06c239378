"""OpenRLHF, SkyRL and ms-swift with every distinct token of a micro-batch computed once.

Each `use_..` replaces one method of the trainer's class, in this process; all but log-probabilities
stays the trainer's code. Workers of Ray run it by a hook:

    runtime_env={"worker_process_setup_hook": "prefixtree.integrations.batch_trainers.use_openrlhf"}

Neither the trainer's module, which loads DeepSpeed, nor transformers is imported before the worker
imports them. ms-swift's processes run it from a file of two lines, given as `--external_plugins`.
Legend: B rows, L columns.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from prefixtree.errors import UnsupportedError
from prefixtree.registration import when_imported

if TYPE_CHECKING:
    import torch

# the replacements of forwards in trainers' classes
_OURS: WeakSet[Any] = WeakSet()


def use_openrlhf() -> None:
    """Makes OpenRLHF 0.11.2 pack micro-batches: `Actor`, for policy and reference.

    Critics and reward models are unchanged.

    Raises:
        ImportError: openrlhf is not installed, or has no such module.
        UnsupportedError: from the forward: images, or ring attention.
    """

    def forward(
        self: Any,
        theirs: Callable[..., Any],
        sequences: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        return_output: bool = False,
        allgather_logits: bool = False,
        return_logprobs: bool = False,
        ring_attn_group: Any = None,
        packed_seq_lens: Any = None,
        return_entropy: bool = False,
        **images: Any,
    ) -> Any:
        if action_mask is None and not return_logprobs:
            # the caller wants logits
            return theirs()
        _refuse_images(images)
        if ring_attn_group is not None:
            raise UnsupportedError(
                "ring attention is not verified on a forest: set ring_attn_size=1"
            )
        from prefixtree.scoring.batches import batch_logprobs

        scores = batch_logprobs(
            self.model,
            sequences,
            attention_mask,
            temperature=self.temperature,
            return_entropy=return_entropy,
        )
        logprobs = scores.logprobs[:, 1:]
        if action_mask is not None:
            logprobs = logprobs[:, -action_mask.shape[1] :] * action_mask.float()
        if not return_output:
            return logprobs
        entropy = scores.entropy[:, 1:] if scores.entropy is not None else None
        return logprobs, replace(scores, entropy=entropy)

    _use("openrlhf.models.actor", "Actor", forward)


def use_skyrl() -> None:
    """Makes SkyRL 0.3.0 pack micro-batches: `HFModelWrapper`, for policy and reference.

    Critics are unchanged.

    Raises:
        ImportError: skyrl is not installed, or has no such module.
        UnsupportedError: from the forward: images, or sequence parallelism.
    """

    def forward(
        self: Any,
        theirs: Callable[..., Any],
        sequences: torch.Tensor,
        num_actions: int | list[int],
        attention_mask: torch.Tensor | None = None,
        temperature: float = 1.0,
        return_output: bool = False,
        compute_entropy: bool = False,
        entropy_requires_grad: bool = True,
        **images: Any,
    ) -> Any:
        _refuse_images(images)
        if self.sequence_parallel_size > 1:
            raise UnsupportedError(
                "sequence parallelism is not verified on a forest: set sequence_parallel_size=1"
            )
        if isinstance(num_actions, list):
            (num_actions,) = set(num_actions)
        from prefixtree.scoring.batches import batch_logprobs

        scores = batch_logprobs(
            self.model,
            sequences,
            attention_mask,
            temperature=temperature,
            return_entropy=compute_entropy,
        )
        logprobs = scores.logprobs[:, -num_actions:]
        if not return_output:
            return logprobs
        output: dict[str, Any] = {}
        if scores.entropy is not None:
            # SkyRL keeps an entropy at the predictor
            entropy = scores.entropy.roll(-1, 1)
            output["entropy"] = entropy if entropy_requires_grad else entropy.detach()
        return logprobs, output

    _use("skyrl.backends.skyrl_train.workers.model_wrapper", "HFModelWrapper", forward)


def use_ms_swift() -> None:
    """Makes ms-swift 4.6.0 pack micro-batches: `GRPOTrainer`, with and without padding_free.

    Raises:
        ImportError: ms-swift is not installed.
        UnsupportedError: from the forward: images.
    """
    from prefixtree.models.checks import set_attention, transformer_of
    from prefixtree.scoring.batches import batch_logprobs

    trainer = importlib.import_module("swift.rlhf_trainers.grpo_trainer").GRPOTrainer
    theirs = trainer._get_logps_via_local_forward

    @functools.wraps(theirs)
    def local_forward(
        self: Any,
        model: Any,
        model_inputs: dict[str, Any],
        logits_to_keep: int,
        input_ids: torch.Tensor,
        compute_entropy: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _refuse_images({n: v for n, v in model_inputs.items() if "pixel" in n or "grid" in n})
        # scoring checks the model and prepares its layers with a state
        set_attention(transformer_of(model))
        layout = "position_ids" if self.template.padding_free else "attention_mask"
        scores = batch_logprobs(
            model,
            input_ids,
            **{layout: model_inputs[layout]},
            temperature=self.temperature,
            return_entropy=compute_entropy,
        )
        entropy = None if scores.entropy is None else scores.entropy[:, -logits_to_keep:]
        return scores.logprobs[:, -logits_to_keep:], entropy

    trainer._get_logps_via_local_forward = local_forward


def _use(module: str, name: str, forward: Callable[..., Any]) -> None:
    """Replaces a class's forward and prepares the models it makes, once its module is imported."""
    _check_that_it_is_there(module)

    def replace_in(imported: Any) -> None:
        owner = getattr(imported, name)
        if owner.forward in _OURS:
            return
        theirs, construct = owner.forward, owner.__init__

        @functools.wraps(construct)
        def construct_and_prepare(self: Any, *args: Any, **kwargs: Any) -> None:
            from prefixtree.models.prepared import prepare

            construct(self, *args, **kwargs)
            prepare(self.model)

        @functools.wraps(theirs)
        def packed_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # the trainer's own forward, with the arguments of this call
            return forward(self, functools.partial(theirs, self, *args, **kwargs), *args, **kwargs)

        _OURS.add(packed_forward)
        owner.forward, owner.__init__ = packed_forward, construct_and_prepare

    when_imported(module, replace_in)


def _check_that_it_is_there(module: str) -> None:
    """Raises an ImportError if no import could find a module, without importing it."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    for part in inner:
        if spec is None:
            break
        package = f"{package}.{part}"
        spec = PathFinder.find_spec(package, spec.submodule_search_locations)
    if spec is None:
        raise ModuleNotFoundError(
            f"there is no {package}, whose class in {module} would run on prefixtree: install the "
            "version of the trainer that docs/your-trainer.md names",
            name=package,
        )


def _refuse_images(images: dict[str, Any]) -> None:
    if given := [name for name, value in images.items() if value is not None]:
        raise UnsupportedError(
            f"{', '.join(given)}: images are not verified with this trainer; train on text alone"
        )
