"""The prefix forest of a batch: which tokens its sequences share.

Legend: S sequences, N nodes, T distinct tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from prefixtree import loops
from prefixtree._forest_inputs import (
    check_invariants,
    check_packed_routes,
    check_tokens,
    flatten,
    is_nested,
    join_routes,
    label_numbers,
    numbers_of,
    unbroken_runs,
)
from prefixtree._numbers import entries, integer, integers, selection, to_numpy
from prefixtree.errors import ForestError, with_command, with_hints

if TYPE_CHECKING:
    import networkx

ORDERS = ("heaviest", "input")
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, eq=False, repr=False)
class PrefixForest:
    """A path-compressed prefix forest in read-only numpy arrays.

    Build one with `from_sequences`, `from_padded`, `from_groups` or `from_parents`. A node is a run
    of tokens that the same sequences hold. Nodes are in preorder (depth first), so the tokens of
    any subtree are one contiguous run in packed order.

    Attributes:
        node_parent: int32 [N], the parent's index, -1 for a root.
        node_start: int32 [N], the node's first token in packed order.
        node_length: int32 [N], the node's number of tokens.
        node_position: int32 [N], the position of the node's first token in its sequences: the
            number of tokens on the path above the node.
        node_subtree_end: int32 [N], one past the last packed token of the node's subtree.
        sequence_node: int32 [S], the node at whose last token the sequence ends.
        tokens: int64 [T], token ids in packed order, or None where only the structure was given.
        columns: None, or for `from_padded` (L, int64 [S] column of each sequence's first token).
        routes: None, or int16 [T, layers, k]: the experts that each layer of a mixture is to run
            for each packed token, ascending; -1 where none are recorded (`from_sequences`).
        is_dummy: whether it stands for nothing (`dummy`): one token, whose multiplicity is 0.

    Invariants, checked whenever one is made (`ForestError` otherwise):

        1. parents precede children; a root has parent -1 and position 0;
        2. lengths are >= 1 and nodes lie side by side: start[n + 1] = start[n] + length[n];
        3. position[n] = position[parent] + length[parent];
        4. nodes stand depth first: a subtree lies within its parent's, and holds the tokens of its
           node and of that node's descendants, no more and no fewer;
        5. every leaf ends at least one sequence, so that no token is without a sequence.

    Siblings may begin with the same token (`from_groups`, `from_parents` take structure as given).
    """

    node_parent: np.ndarray
    node_start: np.ndarray
    node_length: np.ndarray
    node_position: np.ndarray
    node_subtree_end: np.ndarray
    sequence_node: np.ndarray
    tokens: np.ndarray | None = None
    columns: tuple[int, np.ndarray] | None = None
    routes: np.ndarray | None = None
    is_dummy: bool = False

    def __new__(cls, *arrays: Any, **named: Any) -> PrefixForest:
        if len(arrays) == 1 and not named:
            raise TypeError("PrefixForest.from_sequences(sequences) makes one of token sequences")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_invariants(self)
        columns = () if self.columns is None else self.columns
        for value in (*vars(self).values(), *columns):
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # through the constructor, which checks and makes the arrays read-only
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    # ---- constructors ----------------------------------------------------------------------------

    @classmethod
    @with_hints
    def from_sequences(
        cls,
        sequences: Iterable[Any],
        namespaces: Sequence[Hashable] | None = None,
        *,
        order: str = "heaviest",
        routes: Iterable[Any] | None = None,
        loss_mask: Iterable[Any] | None = None,
    ) -> PrefixForest:
        """Finds every shared prefix of `sequences` by their token ids.

        Args:
            sequences: S sequences of token ids, each a list, a numpy array or a torch tensor, 1-D.
                A sequence may be repeated, or be a prefix of another.
            namespaces: S hashable labels, one per sequence; sequences of different namespaces share
                nothing. Use them for differences that token ids do not show: LoRA adapters, images,
                system state. Default: all sequences may share.
            order: the order of siblings. "heaviest": largest subtree first, which gives the fewest
                partial tiles; ties in input order. "input": input order. Results per sequence come
                back in input order either way. Default: "heaviest".
            routes: S integer arrays [n, layers of experts, experts per token]: the experts that a
                mixture chose when the sequences were generated, for `sequence_logprobs` to choose
                again (router replay). The tree parts where routes differ; the order in which a
                route lists its experts does not matter. Rows that the engine did not record are
                left out at the end, or are zeros, or -1: that of the last token, and with
                `loss_mask` all after which nothing is scored. Default: the model chooses.
            loss_mask: for `routes`, that of `sequence_logprobs` or one that selects more. Default:
                every token is scored. What depends on a row that is not recorded is not scored.

        Returns:
            The forest, with `tokens`, and with `routes` where they are given.

        Raises:
            ForestError: no sequences, an empty one, tokens that are negative or not integers, an
                array of another rank than 1, another number of namespaces than of sequences,
                routes or masks that do not match the sequences or each other, or a loss_mask
                without routes.
        """
        flat, lengths = flatten(sequences, "sequences")
        if routes is None:
            if loss_mask is not None:
                raise ForestError(
                    "loss_mask says which routes may be missing, and there are none: give routes= "
                    "too, or loss_mask to sequence_logprobs alone"
                )
            return cls._from_flat(flat, lengths, namespaces, order)
        routed = join_routes(routes, lengths, loss_mask)
        return cls._from_flat(flat, lengths, namespaces, order, routed)

    @classmethod
    @with_hints
    def from_padded(
        cls,
        input_ids: Any,
        attention_mask: Any,
        namespaces: Sequence[Hashable] | None = None,
        *,
        order: str = "heaviest",
    ) -> PrefixForest:
        """Finds every shared prefix of a padded batch, as `from_sequences`.

        Args:
            input_ids: [B, L] integers, numpy or torch, padded left, right or on both sides.
            attention_mask: [B, L], 1 on tokens and 0 elsewhere; each row one unbroken run of them.
            namespaces: as in `from_sequences`.
            order: as in `from_sequences`.

        Returns:
            The forest, with `tokens` and `columns`: `PackedForest.unpack_padded` puts values back
                into the columns they came from.

        Raises:
            ForestError: shapes that differ, a row without tokens or with a hole, and whatever
                `from_sequences` raises.
        """
        ids = to_numpy(input_ids, "input_ids")
        mask = selection("attention_mask", attention_mask)
        if ids.ndim != 2 or mask.shape != ids.shape:
            raise ForestError(
                "from_padded expects input_ids and attention_mask of one shape [B, L], got "
                f"{list(ids.shape)} and {list(mask.shape)}"
            )
        if ids.size == 0:
            raise ForestError(
                f"from_padded expects at least one row and one column, got shape {list(ids.shape)}"
            )
        first, lengths = unbroken_runs(mask)
        for bad in np.flatnonzero(lengths == 0)[:1]:
            raise ForestError(f"row {bad} of attention_mask has no token; drop the row")
        forest = cls._from_flat(check_tokens(ids[mask], "input_ids"), lengths, namespaces, order)
        columns = (ids.shape[1], first.astype(np.int64))
        return cls(**{**vars(forest), "columns": columns})

    @classmethod
    @with_hints
    def from_groups(
        cls,
        prompts: Iterable[Any],
        responses: Sequence[Sequence[Any]],
        *,
        order: str = "heaviest",
    ) -> PrefixForest:
        """Builds one tree per prompt, with its responses as children.

        This is DualKV's case (arXiv 2605.15422). The structure is taken as given: equal prompts are
        not joined, and responses of one prompt share nothing but the prompt. `from_sequences` on
        prompt + response finds all sharing.

        Args:
            prompts: P sequences of token ids.
            responses: P lists of sequences of token ids. Sequences, a prompt with one of its
                responses, are numbered through responses[0], then responses[1], and so on.
            order: as in `from_sequences`.

        Raises:
            ForestError: as `from_sequences`, and where the lists do not match or a prompt has no
                response.
        """
        kind = "sequences of token ids"
        prompts = entries("prompts", prompts, f"a list of {kind}")
        responses = [
            entries(f"responses[{i}]", group, f"a list of {kind}")
            for i, group in enumerate(entries("responses", responses, f"a list of lists of {kind}"))
        ]
        if len(prompts) != len(responses):
            raise ForestError(
                "from_groups expects one list of responses per prompt, got "
                f"{len(prompts)} prompts and {len(responses)} lists"
            )
        for i, group in enumerate(responses):
            if not group:
                raise ForestError(f"prompts[{i}] has no response; drop the prompt")
        groups = np.array([len(group) for group in responses], np.int64)
        flat_prompts, prompt_lengths = flatten(prompts, "prompts")

        def label(response: int) -> str:
            prompt = int(np.searchsorted(np.cumsum(groups), response, side="right"))
            return f"responses[{prompt}][{response - groups[:prompt].sum()}]"

        flat_responses, response_lengths = flatten(
            [response for group in responses for response in group], "responses", label
        )
        flat = np.concatenate([flat_prompts, flat_responses])
        num_prompts = len(prompts)
        parent = np.concatenate(
            [np.full(num_prompts, -1), np.repeat(np.arange(num_prompts), groups)]
        )
        leaves = np.arange(num_prompts, len(parent))
        length = np.concatenate([prompt_lengths, response_lengths])
        source = np.concatenate([[0], np.cumsum(length)[:-1]])
        first = np.arange(len(parent))
        return cls._assemble(parent, length, first, leaves, order, flat, source)

    @classmethod
    @with_hints
    def from_parents(
        cls,
        parents: Any,
        lengths: Any,
        tokens: Any = None,
        sequence_ends: Any = None,
        *,
        order: str = "heaviest",
        routes: Any = None,
    ) -> PrefixForest:
        """Builds a forest whose structure is known, from a tree search for example.

        Args:
            parents: N parent indices, -1 for roots, in any order without cycles.
            lengths: N numbers of tokens, each >= 1.
            tokens: token ids of all nodes one after another in the order given (sum of lengths),
                or a list of N sequences. Without them the forest drives attention, not a model.
            sequence_ends: the node at whose last token each sequence ends. A node may be named
                twice (a repeated sequence). Default: the leaves, in the order given.
            order: as in `from_sequences`.
            routes: integers [sum of lengths, layers, k], as `tokens` stand: the experts of each
                token; rows of -1 are not recorded. Default: the model chooses.

        Returns:
            The forest; its nodes are in preorder, not in the order given.

        Raises:
            ForestError: a cycle, an index out of range, a length below 1, tokens or routes of
                another number, a leaf at which no sequence ends.
        """
        parent, length = integers("parents", parents), integers("lengths", lengths)
        n = len(parent)
        if n == 0:
            raise ForestError("from_parents expects at least one node, got none")
        if len(length) != n:
            raise ForestError(
                f"from_parents expects as many lengths as parents, got {len(length)} and {n}"
            )
        for bad in np.flatnonzero((parent < -1) | (parent >= n))[:1]:
            raise ForestError(f"parents[{bad}] is {parent[bad]}; expected -1 or a node below {n}")
        for bad in np.flatnonzero(length < 1)[:1]:
            raise ForestError(f"lengths[{bad}] is {length[bad]}; a node has at least one token")

        topological = loops.trie.parents_first(parent)
        if len(topological) < n:
            bad = int(np.setdiff1d(np.arange(n), topological)[0])
            raise ForestError(
                f"parents has a cycle through node {bad}; expected a path to a root (-1) from "
                "every node"
            )
        flat = source = None
        if tokens is not None:
            if is_nested(tokens):
                flat, flat_lengths = flatten(tokens, "tokens")
                if len(flat_lengths) != n or (flat_lengths != length).any():
                    raise ForestError("tokens[n] must hold lengths[n] token ids for every node n")
            else:
                flat, _ = flatten([tokens], "tokens")
            if len(flat) != length.sum():
                raise ForestError(
                    f"tokens has {len(flat)} token ids; lengths add up to {length.sum()}"
                )
            source = (np.cumsum(length) - length)[topological]
        if sequence_ends is None:
            ends = np.setdiff1d(np.arange(n), parent)
        else:
            ends = integers("sequence_ends", sequence_ends)
            if len(ends) == 0:
                raise ForestError(
                    "sequence_ends is empty; expected one node per sequence, or None for the leaves"
                )
            for bad in np.flatnonzero((ends < 0) | (ends >= n))[:1]:
                raise ForestError(f"sequence_ends[{bad}] is {ends[bad]}; expected a node below {n}")
        rank = np.empty(n, np.int64)
        rank[topological] = np.arange(n)
        above = parent[topological]
        above = np.where(above < 0, -1, rank[above])
        if routes is not None:
            routes = check_packed_routes(routes, int(length.sum()))
        return cls._assemble(
            above, length[topological], topological, rank[ends], order, flat, source, routes
        )

    def dummy(self) -> PrefixForest:
        """Makes the forest that runs where there is nothing to compute, as other ranks may wait.

        It is one token, which a model that knows this forest's tokens knows. Nothing is scored, its
        multiplicity and values are 0, and no parameter gets a gradient but 0.
        """
        # the largest token may stand for images
        tokens = None if self.tokens is None else self.tokens.min(keepdims=True)
        routes = None if self.routes is None else self.routes[:1]
        only = type(self).from_parents([-1], [1], tokens, routes=routes)
        return type(self)(**{**vars(only), "is_dummy": True})

    @classmethod
    def _from_flat(
        cls,
        flat: np.ndarray,
        lengths: np.ndarray,
        namespaces: Sequence[Hashable] | None,
        order: str,
        routes: np.ndarray | None = None,
    ) -> PrefixForest:
        num_sequences = len(lengths)
        offsets = np.zeros(num_sequences + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if namespaces is None:
            namespace_of, perm = np.zeros(num_sequences, np.int64), np.arange(num_sequences)
        else:
            namespace_of = label_numbers(namespaces, "namespaces", num_sequences)
            perm = np.argsort(namespace_of, kind="stable")
        # what makes two tokens the same: their ids, and their keys where they have some
        identity = flat if routes is None else numbers_of(flat, routes)
        *nodes, sequence_node = loops.trie.find_prefixes(identity, offsets, perm, namespace_of)
        parent, length, source, first = nodes
        return cls._assemble(parent, length, first, sequence_node, order, flat, source, routes)

    @classmethod
    def _assemble(
        cls,
        parent: np.ndarray,
        length: np.ndarray,
        first: np.ndarray,
        sequence_node: np.ndarray,
        order: str,
        flat: np.ndarray | None,
        source: np.ndarray | None,
        routes: np.ndarray | None = None,
    ) -> PrefixForest:
        """Orders siblings and lays the nodes out in preorder; parents come before children.

        `first` ranks siblings first-come; node n's tokens stand at flat[source[n]:], and their
        routes at routes[source[n]:].
        """
        if order not in ORDERS:
            raise ForestError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
        parent = np.ascontiguousarray(parent, np.int32)
        length = np.ascontiguousarray(length, np.int64)
        num_tokens = int(length.sum())
        if num_tokens > _MAX_TOKENS:
            raise ForestError(
                f"the forest has {num_tokens} distinct tokens; one forest holds at most "
                f"{_MAX_TOKENS}: split the batch"
            )
        if order == "heaviest":
            rank = (first, -loops.trie.subtree_weights(parent, length), parent)
            siblings = np.lexsort(rank)
        else:
            siblings = np.lexsort((first, parent))
        new_id, *nodes = loops.trie.preorder(parent, length, siblings)
        tokens = None
        if flat is not None and source is not None:
            source = np.ascontiguousarray(source, np.int64)
            # numpy's large arrays come in huge pages, numba's do not: a third of the time
            tokens = np.empty(num_tokens, np.int64)
            loops.trie.gather_tokens(flat, source, new_id, nodes[1], nodes[2], tokens)
        if routes is not None and source is not None:
            place = np.empty(num_tokens, np.int64)
            every = np.arange(len(routes))
            loops.trie.gather_tokens(every, source, new_id, nodes[1], nodes[2], place)
            routes = routes[place]
        above, start, node_length, position, subtree_end = nodes
        ends = new_id[sequence_node]
        return cls(above, start, node_length, position, subtree_end, ends, tokens, routes=routes)

    # ---- facts -----------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """N, the number of nodes of the compressed forest."""
        return len(self.node_parent)

    @property
    def num_sequences(self) -> int:
        """S, the number of sequences handed in, repeated ones included."""
        return len(self.sequence_node)

    @property
    def num_tokens(self) -> int:
        """T, the number of distinct tokens: what is packed and computed."""
        return int(self.node_start[-1]) + int(self.node_length[-1])

    @property
    def num_replicated_tokens(self) -> int:
        """R, the tokens of all sequences together: what a trainer without sharing computes."""
        return int(self.sequence_lengths.sum())

    @property
    def replication_ratio(self) -> float:
        """Replicated tokens divided by distinct tokens; 1.0 where nothing is shared."""
        return self.num_replicated_tokens / self.num_tokens

    @property
    def num_levels(self) -> int:
        """The number of nodes on the path that has most of them: 1 where nothing is shared."""
        return int(self.node_level.max()) + 1

    @cached_property
    def sequence_lengths(self) -> np.ndarray:
        """int64 [S], the number of tokens of each sequence, in input order."""
        node = self.sequence_node
        lengths = (self.node_position[node] + self.node_length[node]).astype(np.int64)
        lengths.setflags(write=False)
        return lengths

    @cached_property
    def node_level(self) -> np.ndarray:
        """int32 [N], the number of ancestors of each node: 0 at roots."""
        return loops.trie.levels(self.node_parent)

    @cached_property
    def node_multiplicity(self) -> np.ndarray:
        """int32 [N], how many sequences run through each node; 0 in a dummy."""
        if self.is_dummy:
            return np.zeros(self.num_nodes, np.int32)
        ends = np.bincount(self.sequence_node, minlength=self.num_nodes)
        # a subtree is one run of nodes: the sequences below are a difference of prefix sums
        total = np.concatenate([[0], np.cumsum(ends)])
        last = np.searchsorted(self.node_start, self.node_subtree_end)
        return (total[last] - total[:-1]).astype(np.int32)

    def path(self, sequence: int) -> np.ndarray:
        """Lists the nodes of one sequence, from its root down: int64 indices.

        Raises:
            ValueError: no integer.
            IndexError: a sequence that does not exist.
        """
        sequence = integer("sequence", sequence)
        if not 0 <= sequence < self.num_sequences:
            raise IndexError(
                f"sequence {sequence} does not exist; expected 0 to {self.num_sequences - 1}"
            )
        nodes = []
        node = int(self.sequence_node[sequence])
        while node >= 0:
            nodes.append(node)
            node = int(self.node_parent[node])
        return np.array(nodes[::-1])

    def to_networkx(self) -> networkx.DiGraph:
        """Converts the forest to a directed networkx graph, with edges from parents to children.

        Its nodes are numbered 0 .. N - 1, in preorder. Their attributes, lengths and positions in
        tokens: start, length, position, level, subtree_end, multiplicity, sequences (a list of the
        indices of the sequences that end at the node) and tokens (int64 token ids of the node, or
        None). `depth` is the old name of position, kept for one release.
        """
        try:
            import networkx
        except ModuleNotFoundError as problem:
            raise with_command("to_networkx", problem) from None

        ends: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for sequence, node in enumerate(self.sequence_node):
            ends[node].append(sequence)
        graph = networkx.DiGraph()
        for n in range(self.num_nodes):
            start, length = int(self.node_start[n]), int(self.node_length[n])
            graph.add_node(
                n,
                start=start,
                length=length,
                position=int(self.node_position[n]),
                depth=int(self.node_position[n]),
                level=int(self.node_level[n]),
                subtree_end=int(self.node_subtree_end[n]),
                multiplicity=int(self.node_multiplicity[n]),
                sequences=ends[n],
                tokens=None if self.tokens is None else self.tokens[start : start + length],
            )
            if self.node_parent[n] >= 0:
                graph.add_edge(int(self.node_parent[n]), n)
        return graph

    def __repr__(self) -> str:
        return (
            f"PrefixForest({self.num_sequences} sequences, {self.num_tokens} distinct of "
            f"{self.num_replicated_tokens} tokens, {self.num_nodes} nodes, "
            f"{self.num_levels} levels)"
        )
