"""The beginning of every trainer of TRL on packed forests: checks, and one setting of FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import torch

from prefixtree.errors import Refusal, refuse
from prefixtree.integrations.trl.contract import check_trainer
from prefixtree.integrations.trl.refusals import check_recompute, prepare_trainer
from prefixtree.integrations.trl.sharing_report import DATA_SET_ADVICE, SharingReport
from prefixtree.recompute.choose import Recompute

#: The trainer of TRL that a base stands before, to a checker of types.
BeforeTRL: Any = object


class PackedTrainer:
    """A base before every trainer of TRL on packed forests."""

    def _start(
        self, recompute: Recompute, rows: Iterable[Refusal], verified: Collection[str]
    ) -> None:
        """Refuses, after TRL's constructor, what is not verified, and prepares the models."""
        refuse(rows, self)
        prepare_trainer(self, verified)
        self._recompute = check_recompute(self, recompute)

    def create_accelerator_and_postprocess(self) -> None:
        # within TRL's constructor, before it shards the models
        trainer: Any = super()
        trainer.create_accelerator_and_postprocess()
        this: Any = self
        if this.is_fsdp_enabled:
            keep_outputs(this.accelerator.state.fsdp_plugin)


class DataSetTrainer(PackedTrainer, BeforeTRL):
    """A base before TRL's trainers whose rows come from a data set as they are.

    Attributes:
        trl_class: the class of TRL that is extended.
        refused: what is refused in addition to `prepare_trainer`.
        verified: settings of the table `ALONE` that are served.
    """

    trl_class: type
    refused: tuple[Refusal, ...] = ()
    verified: tuple[str, ...] = (
        "use_liger_kernel",
        "torch_compile",
        "fp16",
        "activation_offloading",
    )

    def __init__(self, *args: Any, recompute: Recompute = None, **kwargs: Any) -> None:
        check_trainer(self.trl_class)
        super().__init__(*args, **kwargs)
        self._start(recompute, self.refused, self.verified)
        self._sharing = SharingReport(self, self._advice(), recompute=self._recompute)
        self._started()

    def _advice(self) -> str:
        """Settings that help where sequences share no token."""
        return DATA_SET_ADVICE

    def _started(self) -> None:
        """Ends the constructor."""


def keep_outputs(plugin: Any) -> None:
    """Lets models under mixed precision return log-probabilities in float32, as they computed them.

    By default accelerate casts the output of every sharded module to the parameters' dtype.
    bfloat16 keeps 8 bits of a log-probability. Without the cast, layers still return bfloat16, as
    they compute in it. Call this before a model is sharded.
    """
    policy = plugin.mixed_precision_policy
    if plugin.fsdp_version != 2 or policy is None:
        return
    if policy.output_dtype not in (None, torch.float32):
        plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)
