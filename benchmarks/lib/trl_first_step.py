"""The first steps of one side under TRL, in the process that is timed.

    python -m benchmarks.lib.trl_first_step JSON      # `benchmarks first_step --trainer trl` does

It imports what a user's script imports before anything of the benchmarks, whose imports are not
counted.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

# of our log p in bf16 over that of the model's rounded logits; what may differ in float32
FACTOR, EXACT = 2.0, 1e-3
# rows of the first micro-batch that are checked
CHECKED = 4


def run(
    began: float, side: str, sizes: list[int], steps: int, options: Namespace
) -> dict[str, Any]:
    """Some steps of a trainer.

    Args:
        began: the process's start, seconds of `time.time`.
        side: as `Side.of` reads it. sizes: of `Work`, in its order.
        options: what `make_trainer` reads, and dtype.

    Returns:
        the row: seconds of imports, of the model and its trainer, of the first step and its parts,
        of compilers until its end (loops: numba's), of the second step and the median of later
        ones; or what is red.
    """
    loops: Any = None
    if side.startswith("prefixtree"):
        # the package imports it where a loop is used first
        from numba.core import event

        from prefixtree import compile_layers  # noqa: F401
        from prefixtree.integrations.trl import PrefixTreeGRPOTrainer, tree_rollouts  # noqa: F401

        loops = event.TimingListener()
        event.register("numba:compile", loops)
    else:
        from trl import GRPOConfig, GRPOTrainer  # noqa: F401
    imported = time.time()
    from torch._dynamo.utils import calculate_time_spent
    from transformers import TrainerCallback

    from benchmarks.lib.trl_steps import (
        Side,
        Timed,
        Work,
        logged,
        make_trainer,
        model_of,
        rollout_of,
    )

    named, work = Side.of(side), Work(*sizes)
    first: dict[str, Any] = {}

    class AtFirst(TrainerCallback):
        def on_step_end(self, *given: Any, **more: Any) -> None:
            if not first:
                first["end"] = time.time()
                first["torch_compile"] = calculate_time_spent().get("total_wall_time", 0.0)
                first["loops"] = loops.duration if loops is not None and loops.done else 0.0

    ready = time.time()
    model = model_of(named, options, options.dtype, work.ends())
    with tempfile.TemporaryDirectory() as folder:
        rollout = rollout_of(named, work)
        trainer = make_trainer(named, work, options, model, steps, Path(folder), rollout)
        scored = FirstScores(trainer)
        times = Timed(trainer, 1)
        trainer.add_callback(AtFirst())
        made = time.time()
        trainer.train()
    losses = logged(trainer, "loss")
    plain = model_of(Side.of("trl"), options, options.dtype, None)
    errors = scored.errors(plain, trainer.temperature)
    red = wrong(named.trainer, losses, steps, errors)
    if red:
        return {"red": red}
    later = [step["seconds"] for step in times.steps[2:]]
    return {
        "red": [],
        "import": imported - began,
        "model": made - ready,
        **{name: first[name] for name in ("torch_compile", "loops")},
        "operators": _first_calls(side),
        "first": times.steps[0],
        "second": times.steps[1]["seconds"],
        "later": statistics.median(later) if later else None,
        "total": first["end"] - began - (ready - imported),
        "steps": times.steps,
        "losses": losses,
        "errors": errors,
    }


def _first_calls(side: str) -> dict[str, float]:
    """Seconds of the first call of each of our operators."""
    if not side.startswith("prefixtree"):
        return {}
    from prefixtree.kernels.operators import first_calls

    return first_calls()


class FirstScores:
    """The log-probabilities of a trainer's first micro-batch, before it has learnt anything."""

    def __init__(self, trainer: Any) -> None:
        self._found: tuple[Any, ...] | None = None
        method = trainer._get_per_token_logps_and_entropies

        def noted(model: Any, ids: Any, mask: Any, keep: int, *more: Any, **options: Any) -> Any:
            out = method(model, ids, mask, keep, *more, **options)
            if self._found is None:
                self._found = ids, mask, keep, out[0].detach().clone()
            return out

        trainer._get_per_token_logps_and_entropies = noted

    def errors(self, plain: Any, temperature: float) -> dict[str, float]:
        """Root mean squares of what log p differs by from float32: the trainer's ("side"), and that
        of transformers' logits ("plain"), which are rounded to the dtype of `plain`, a model of the
        first weights that becomes float32."""
        import torch

        if self._found is None:
            return {"side": math.nan, "plain": math.nan}
        ids, mask, keep, found = self._found
        rows = torch.linspace(0, len(ids) - 1, min(CHECKED, len(ids))).long()

        @torch.no_grad()
        def log_p(model: Any) -> torch.Tensor:
            out = []
            for row in rows:
                one = {"input_ids": ids[row, None], "attention_mask": mask[row, None]}
                logits = model(**one, logits_to_keep=keep + 1).logits[0, :-1].float()
                of_all = (logits / temperature).log_softmax(-1)
                out.append(of_all.gather(1, ids[row, -keep:, None])[:, 0])
            return torch.stack(out)

        def rms(values: torch.Tensor) -> float:
            return float((values - exact)[mask[rows, -keep:].bool()].square().mean().sqrt())

        rounded, exact = log_p(plain), log_p(plain.float())
        return {"side": rms(found[rows].float()), "plain": rms(rounded)}


def wrong(trainer: str, losses: list[float], steps: int, errors: dict[str, float]) -> list[str]:
    """What is red. TRL rounds log p itself: of its trainer they have to be finite."""
    red = []
    if len(losses) != steps or not all(map(math.isfinite, losses)):
        red.append(f"losses {losses} of {steps} steps")
    limit = max(EXACT, FACTOR * errors["plain"]) if trainer == "prefixtree" else math.inf
    if not errors["side"] < limit:
        red.append(f"log p of the first step {errors['side']:.2g} off, at most {limit:.2g}")
    return red


if __name__ == "__main__":
    _given = json.loads(sys.argv[1])
    _options = Namespace(**_given.pop("options"))
    print(json.dumps(run(**_given, options=_options)))
