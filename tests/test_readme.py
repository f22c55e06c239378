"""The README's example runs as printed, and what it says of it is true."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_ten_lines_and_the_loop_run() -> None:
    code, loop = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    forest, scores = names["packed"].forest, names["scores"]
    assert (forest.num_tokens, forest.num_replicated_tokens) == (11, 22)
    assert [len(x) for x in scores.logprobs] == [5, 6, 4, 3]
    assert scores.entropy is None
    grads = [p.grad for p in names["model"].parameters()]
    assert all(g is not None and g.isfinite().all() for g in grads)
    assert any(g.abs().max() > 0 for g in grads)
    seen = []
    for rank in range(8):
        names |= {"rank": rank, "world_size": 8}
        exec(loop, names)
        seen += [i for batch in names["plan"][rank] for i in batch.sequence_indices.tolist()]
    assert sorted(seen) == [0, 1, 2, 3]


def test_the_families_named_are_the_families_verified() -> None:
    from prefixtree.integrations.transformers import supported_model_types

    (named,) = re.findall(r"<!-- families -->(.*?)<!-- /families -->", README.read_text())
    assert named.split(", ") == supported_model_types()
