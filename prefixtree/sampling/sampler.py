"""`TreeSampler`: samples from a model below a prefix forest, each distinct token read once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from prefixtree.errors import with_hints
from prefixtree.forest import PrefixForest
from prefixtree.packing.arguments import at_least_one
from prefixtree.packing.copies import lasting
from prefixtree.packing.layout import pack
from prefixtree.sampling.draws import Draws
from prefixtree.sampling.forward import CachedForward
from prefixtree.sampling.growing_forest import GrowingForest
from prefixtree.sampling.rows import Piece, Row, Rows, Samples, stop_tokens
from prefixtree.sampling.step import Steps


class TreeSampler:
    """Samples with a Hugging Face model in this process, on one growing prefix forest at a time.

    Every distinct token of the forest is read once, and its keys and values are stored once. In a
    decode step, the keys of a node are read once for all rows below it. Samples, log-probabilities
    and their order are exact. In float32, greedy tokens are those of `model.generate`; in a shorter
    dtype, near ties may fall otherwise. The log-probabilities are those of `sequence_logprobs`.

    The keys and values of all layers take `max_keys` x layers x (D + Dv) x key heads numbers. They
    are kept for the next `start`. Layers that share keys keep them once per layer, and latent
    attention (MLA) keeps those of all heads. Recurrent layers keep one state per row, in float32.
    Rows that branched keep one more until they go on.

    Args:
        model: a causal language model of transformers with attn_implementation="prefixtree",
            wrapped (DDP, PEFT) or not. Its own `generate` is not used.
        max_keys: the most tokens whose keys are held: the distinct tokens of the forest, and those
            that every row adds.
        max_rows: the most rows that sample at once. Default: 4096.
        graphs: whether CUDA devices capture decode steps in CUDA graphs, one per number of rows
            (rounded up), and replay them. Hooks of modules run while a step is captured, and not
            when it is replayed. False: every step runs as it is. Default: True.

    Raises:
        TypeError: not a module.
        UnsupportedError: not a model of transformers with an lm_head, or of an unknown type.
        ValueError: max_keys or max_rows below 1.
    """

    def __init__(
        self, model: nn.Module, max_keys: int, max_rows: int = 4096, graphs: bool = True
    ) -> None:
        self._max_keys = at_least_one("max_keys", max_keys)
        self._max_rows = at_least_one("max_rows", max_rows)
        self._forward = CachedForward(model, self._max_keys)
        self._steps = Steps(self._forward, graphs and not self._forward.reads_lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys, values and recurrent states that are held now."""
        return self._forward.cache.num_bytes

    @lasting
    def start(self, forest: PrefixForest) -> Rows:
        """Reads a forest, and makes one row per sequence of it: row i continues sequence i.

        Rows of an earlier start end.

        Args:
            forest: the histories, with token ids.

        Raises:
            TypeError: anything but a PrefixForest.
            ForestError: a forest without token ids.
            MemoryError: more distinct tokens than max_keys, and nothing was computed; or no memory
                for the rows' states.
            UnsupportedError: a model that does not run exactly on packed forests, has sharded
                parameters, runs another attention, or draws dropout; recorded routes; images.
            ValueError: token ids beyond the model's vocabulary.
        """
        self._forward.check_forest(forest)
        growing = GrowingForest(forest, self._max_keys)
        packed = pack(forest)
        histories = packed.unpack(packed.input_ids)  # type: ignore[arg-type]
        # even if the forward fails, the keys of earlier rows are gone
        self._forward.own(None)
        ends = forest.sequence_node[growing.sources]
        last = (forest.node_start + forest.node_length - 1)[ends].astype("int64")
        slots, _ = growing.slots(range(growing.num_rows))
        logits = self._forward.prefill(packed.to(self._forward.device), last, slots)
        rows = [
            Row((source,), (Piece.said(histories[source].numpy()),), logits=logits[place])
            for place, source in enumerate(growing.sources)
        ]
        return Rows(self._forward, self._steps, growing, rows, self._max_rows)

    @with_hints
    def sample(
        self,
        prompts: Iterable[Any],
        n: int,
        max_new_tokens: int,
        draws: Draws | None = None,
        stop: Iterable[int] = (),
    ) -> Samples:
        """Samples n continuations of every prompt, side by side, in the prompts' order.

        Args:
            prompts: sequences of token ids, as `PrefixForest.from_sequences` takes them.
            max_new_tokens: as `Rows.generate` takes it.
            draws: as `Rows.generate` takes them.
            stop: as `Rows.generate` takes it.

        Raises:
            ForestError, MemoryError, UnsupportedError, ValueError: as `start` and `Rows.generate`.
        """
        # checked before the model reads anything
        n, room = at_least_one("n", n), at_least_one("max_new_tokens", max_new_tokens)
        ends = stop_tokens(stop)
        rows = self.start(PrefixForest.from_sequences(prompts))
        rows.branch(n)
        rows.generate(room, draws, ends)
        return rows.samples()
