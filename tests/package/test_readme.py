"""The README's example runs as printed, and what it says of it is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import prefixtree as pt
from tests.support.spawn import run_ranks

README = Path(__file__).parents[2] / "README.md"
OWN_LOOP = README.parent / "docs/own-loop.md"


def _code(page: Path = README) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def _ten_lines() -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(_code()[0], names)
    return names


def _update(names: dict[str, Any], rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Runs the loop of one rank; its gradients."""
    model = names["model"]
    names |= {
        "rank": rank,
        "world_size": world_size,
        "device": torch.device("cpu"),
        # one prompt: one rank gets everything
        "groups": [0, 0, 0, 0],
        "advantages": [1.5, -0.5, 2.0, -1.0],
        "masks": [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 0, 1, 1], [0, 0, 0, 1, 1], [0, 0, 1, 1]],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    model.zero_grad()
    exec(_code()[1], names)
    return {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}


def on_rank(rank: int, folder: Path) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The sequences of this rank, and the gradients that DDP reduced."""
    names = _ten_lines()
    names["model"] = torch.nn.parallel.DistributedDataParallel(names["model"])
    gradients = _update(names, rank, world_size=2)
    return [i for b in names["plan"][rank] for i in b.sequence_indices.tolist()], gradients


def test_the_ten_lines() -> None:
    assert sum(1 for line in _code()[0].splitlines() if line.strip()) == 10
    names = _ten_lines()
    forest, scores = names["packed"].forest, names["scores"]
    assert (forest.num_tokens, forest.num_replicated_tokens) == (11, 22)
    assert [len(x) for x in scores.logprobs] == [5, 6, 4, 3]
    assert scores.entropy is None
    grads = [p.grad for p in names["model"].parameters()]
    assert all(g is not None and g.isfinite().all() for g in grads)
    assert any(g.abs().max() > 0 for g in grads)


def test_the_loop_over_ranks(tmp_path: Path) -> None:
    """On two ranks, of which one has nothing: the gradients of each sequence alone, in eager."""
    names = _ten_lines()
    model = names["model"]
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    single = _update(names, 0, 1)
    assert any(not torch.equal(p, start[n]) for n, p in model.named_parameters())

    model.load_state_dict(start, strict=False)
    model.set_attn_implementation("eager")
    model.zero_grad()
    terms = zip(names["rollouts"], names["advantages"], names["masks"], strict=True)
    scored = sum(sum(mask[1:]) for mask in names["masks"])
    for tokens, advantage, mask in terms:
        ids = torch.tensor(tokens)
        logprobs = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        picked = logprobs.gather(1, ids[1:, None])[:, 0]
        (-advantage * (picked * torch.tensor(mask[1:])).sum() / scored).backward()
    alone = {n: p.grad for n, p in model.named_parameters()}

    (mine, first), (theirs, second) = run_ranks(__name__, tmp_path)
    assert sorted([mine, theirs]) == [[], [0, 1, 2, 3]]
    for name, expected in alone.items():
        for got in (single, first, second):
            torch.testing.assert_close(got[name], expected, atol=1e-6, rtol=1e-4)
        assert torch.equal(first[name], second[name])
    assert max(float(g.abs().max()) for g in alone.values()) > 1e-2


def test_the_code_of_your_own_loop() -> None:
    """It continues that of README; its tensor parallelism wants several ranks, and is not run."""
    names = _ten_lines()
    _update(names, 0, 1)
    model = names["model"].eval()
    recomputing, compiling, spread, heads = _code(OWN_LOOP)
    assert "DistributedConfig" in spread
    exec(recomputing, names)
    assert model.training and [len(x) for x in names["scores"].logprobs] == [5, 6, 4, 3]
    names["value_head"] = torch.nn.Linear(64, 1)
    exec(heads, names)
    assert [len(x) for x in names["values"]] == [6, 7, 5, 4]
    # compiled at the first forward
    exec(compiling, names)
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)


def test_the_families_named_are_the_families_verified() -> None:
    """docs/families.md names them, in its table and before it; README counts them."""
    from prefixtree.integrations.transformers import supported_model_types

    page = README.parent / "docs/families.md"
    marked = r"<!-- families -->(.*?)<!-- /families -->"
    (parts,) = re.findall(marked, page.read_text())
    rows = re.findall(
        r"^\| `([^`,]+)` \| ", page.read_text().partition("## Refused")[0], re.MULTILINE
    )
    assert sorted([*parts.split(", "), *rows]) == supported_model_types()
    (counted,) = re.findall(marked, README.read_text())
    assert counted == f"{len(supported_model_types())} model types"


_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)")


def test_the_files_of_links_are_there() -> None:
    """Those of all pages, as GitHub shows them; `make docs` checks those of the site."""
    pages = [*README.parent.glob("*.md"), *README.parent.glob("benchmarks/*.md")]
    pages += [*README.parent.glob("docs/**/*.md"), README.parent / "tests/README.md"]
    links = [(page, path) for page in pages for path, _ in _LINK.findall(page.read_text())]
    assert len(links) > 100
    for page, path in links:
        assert (page.parent / path).exists(), f"{page.name}: {path}"


def test_the_links_lead_somewhere() -> None:
    """Those of README, with their anchors; `make docs` checks the pages'."""
    links = _LINK.findall(README.read_text())
    assert len(links) > 8
    for path, anchor in links:
        file = README.parent / path
        assert file.exists(), path
        if anchor:
            titles = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor[1:] in slugs, f"{path}{anchor}"


def test_the_version_is_ours() -> None:
    (named,) = re.findall(r"\*\*Status\*\*: version (\S+)\. ", README.read_text())
    assert named == pt.__version__
