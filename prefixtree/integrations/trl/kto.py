"""`PrefixTreeKTOTrainer`: TRL's KTO with every distinct token of a batch computed once."""

from __future__ import annotations

from trl import KTOTrainer

from prefixtree.integrations.trl.data_set_trainers import ComparesWithReference
from prefixtree.integrations.trl.refusals import TEXT


class PrefixTreeKTOTrainer(ComparesWithReference, KTOTrainer):
    """Trains as `trl.KTOTrainer` does, and computes each distinct token of a batch once.

    Losses, gradients and metrics are the same. Policy and reference both share tokens, among the
    answers of a batch, and among the mismatched ones by which TRL estimates the KL. The models get
    attn_implementation="prefixtree".

    Losses, the order of the data and logging are TRL's code. The metrics of `SharingReport` are
    added, without the mismatched answers.

    Args:
        recompute: as in `prefixtree.sequence_logprobs`. Default: None, as `gradient_checkpointing`
            of the arguments says.
        *args: as in `trl.KTOTrainer`.
        **kwargs: as in `trl.KTOTrainer`.

    Raises:
        UnsupportedError: a setting, a model or a batch that is not verified (`docs/refusals.md`).
    """

    trl_class = KTOTrainer
    reference_entries = "ref_logps", "ref_KL_logps"
    # TRL's `compute_ref_log_probs` takes no images
    refused = (TEXT,)
