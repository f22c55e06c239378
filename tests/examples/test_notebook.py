"""The notebook: its code cells run in order, and show what its text says."""

from __future__ import annotations

import json
from typing import Any

from tests.support.spawn import ROOT

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


def test_the_notebook_runs(capsys):
    notebook = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    # no outputs: they would be of another machine
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    names: dict[str, Any] = {}
    for cell in code:
        exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
    printed = capsys.readouterr().out
    assert "tokens, of which" in printed and "largest difference" in printed
    forest = names["forest"]
    assert forest.num_replicated_tokens > 3 * forest.num_tokens
    assert names["of_scores"] < 1e-5 and names["of_gradients"] < 1e-4
    assert len(names["plan"][0]) > 1
    losses = names["losses"]
    assert losses == sorted(losses, reverse=True) and losses[0] - losses[-1] > 0.05
