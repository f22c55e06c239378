"""Runs whose rollouts are `tree_rollouts` under FSDP2, watched: what every rank samples, beside the
model of one process with the parameters of that moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from prefixtree import PrefixForest, pack, sequence_logprobs
from prefixtree.integrations.trl import tree_rollouts
from tests.integrations.trl.runs import parameters, plain_name
from tests.support.hooks import inner


class Watch:
    """A `rollout_func`: `tree_rollouts`, and what is compared at every call.

    Args:
        folder: of the model. adapter: of PEFT, or None.
    """

    def __init__(self, folder: Path, adapter: Any) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if adapter is not None:
            from peft import get_peft_model

            self._model = get_peft_model(self._model, adapter)
        self._model.eval()
        self.worst = dict.fromkeys(("logprobs", "training", "copy", "stale"), 0.0)
        self.wrong_tokens = self.steps = 0

    def __call__(self, chats: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        found = tree_rollouts(chats, trainer)
        if not self.steps:
            # a rank may have none
            some = chats if dist.get_rank() == 0 else []
            assert len(tree_rollouts(some, trainer)["logprobs"]) == len(some)
        greedy = self._greedy(chats, trainer)
        rows = [a + b for a, b in zip(found["prompt_ids"], found["completion_ids"], strict=True)]
        got = torch.tensor([p for row in found["logprobs"] for p in row])
        if self.steps:
            # those of the update before: a copy of then would be as far off
            self._note("stale", got, self._alone(rows, found, trainer.temperature))
        state = self._model.state_dict(keep_vars=True)
        for name, p in parameters(trainer.model).items():
            state[plain_name(name)].data.copy_(p)
        self._note("logprobs", got, self._alone(rows, found, trainer.temperature))
        packed = pack(PrefixForest.from_sequences(rows))
        with torch.no_grad(), inner("evaluated copy of a policy")(trainer) as copied:
            trained, whole = (
                sequence_logprobs(model, packed, temperature=trainer.temperature).logprobs
                for model in (trainer.model, copied)
            )
        # to the bit
        self._note("copy", torch.cat(whole), torch.cat(trained))
        pairs = zip(trained, found["completion_ids"], strict=True)
        self._note("training", got, torch.cat([p[-len(ids) :] for p, ids in pairs]))
        self.wrong_tokens += sum(
            self._next(prompt + said[:at]) != token
            for prompt, said in zip(greedy["prompt_ids"], greedy["completion_ids"], strict=True)
            for at, token in enumerate(said)
        )
        self.steps += 1
        return found

    def _greedy(self, chats: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        temperature, trainer.temperature = trainer.temperature, 1e-5
        try:
            return tree_rollouts(chats, trainer)
        finally:
            trainer.temperature = temperature

    @torch.no_grad()
    def _next(self, ids: list[int]) -> int:
        return int(self._model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())

    @torch.no_grad()
    def _alone(self, rows: list[list[int]], found: Any, temperature: float) -> torch.Tensor:
        """Log-probabilities of the completions, each row by itself."""
        out = []
        for row, said in zip(rows, found["completion_ids"], strict=True):
            ids = torch.tensor([row])
            logits = self._model(input_ids=ids).logits[0, :-1].float() / temperature
            out.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[-len(said) :, 0])
        return torch.cat(out)

    def _note(self, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        self.worst[name] = max(self.worst[name], float((got - want).abs().max()))

    def result(self, trainer: GRPOTrainer) -> dict[str, Any]:
        """Of all ranks."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (self.worst, self.wrong_tokens))
        return {
            **{name: max(worst[name] for worst, _ in every) for name in self.worst},
            "wrong tokens": sum(wrong for _, wrong in every),
            "generations": self.steps,
        }
