"""`NoLabels`: a model's own loss on a packed forest is an error."""

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
    "labels= (or num_items_in_batch=) asks the model for its own loss, which takes the packed "
    "tokens for one sequence: wrong after every branch, and a shared token would count once. Leave "
    "both out and make the loss from prefixtree.sequence_logprobs(model, packed).logprobs"
)
