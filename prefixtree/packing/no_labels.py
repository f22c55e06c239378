"""`NoLabels`: raises if a model computes a loss on a packed forest."""

from __future__ import annotations

from typing import Any, NoReturn

from prefixtree.errors import UnsupportedError


class NoLabels:
    """Stands for `num_items_in_batch`, by which a model divides the loss it makes of `labels=`.

    transformers hands that keyword to the loss alone, and the loss reads it only if there are
    labels. Without labels the object is never touched: compiled code, checkpoints and wrappers pass
    it on as they pass any object. `shift_labels` would be read first, but its mere presence makes
    Liger Kernel's forward compute a loss.
    """

    def __rtruediv__(self, loss: Any) -> NoReturn:
        raise UnsupportedError(LABELS)


LABELS = (
    "labels= (or num_items_in_batch=) asks the model to compute the loss. It would take the "
    "packed tokens for one sequence: wrong after every branch, with a shared token counted once. "
    "Leave both out and compute the loss from prefixtree.sequence_logprobs(model, packed).logprobs"
)
