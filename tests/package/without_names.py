"""A small forest scored where names of other packages are gone: a process by itself.

It reads groups of names, each {name: files of prefixtree that use it}, as JSON, and writes what
came of each group. Nothing is taken from the other packages, which use such names themselves: a
name has another spelling in the text of prefixtree's files as they are imported, so it is not
found. Each group has a fork of a process that has imported transformers, and nothing of prefixtree.
"""

from __future__ import annotations

import importlib.abc
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

CONFIG = transformers.Qwen3Config(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
)


class Renaming(importlib.abc.MetaPathFinder):
    """Imports modules of prefixtree whose files lack the names in `gone`."""

    def __init__(self) -> None:
        self.gone: dict[str, list[str]] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or fullname.split(".")[0] != "prefixtree" or spec.origin is None:
            return None
        names = [n for n, files in self.gone.items() if any(map(spec.origin.endswith, files))]
        if names:
            spec.loader = _Loader(fullname, spec.origin, names)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, names: list[str]) -> None:
        super().__init__(fullname, path)
        self._names = names

    def get_code(self, fullname: str) -> Any:
        text = Path(self.path).read_text()
        for name in self._names:
            text = without(text, name)
        return compile(text, self.path, "exec")


def without(text: str, name: str) -> str:
    """The text, with the last part of a name spelled otherwise."""
    module, _, last = name.rpartition(".")
    # as a whole, where the text has it so: a module
    pattern = rf"\b{re.escape(name)}\b" if module and re.search(rf"\b{name}\b", text) else ""
    pattern = pattern or rf"\b{last}\b"
    changed = re.sub(pattern, lambda found: f"{found[0]}_gone", text)
    assert changed != text, f"{name} is not in the text"
    return changed


def in_a_fork(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            report = run()
        except BaseException:
            report = {"said": [traceback.format_exc()]}
        with open(writer, "w") as file:
            json.dump(report, file)
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        report = json.load(file)
    os.wait()
    return report


def score() -> dict[str, Any]:
    """Registration, and a small forest through a small model."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            import prefixtree

            torch.manual_seed(0)
            model: Any = transformers.AutoModelForCausalLM.from_config(
                CONFIG, attn_implementation="prefixtree"
            )
            packed = prefixtree.pack(
                prefixtree.PrefixForest.from_sequences([[1, 2, 3], [1, 2, 4, 5]])
            )
            scored = torch.cat(prefixtree.sequence_logprobs(model, packed).logprobs)
            scored.sum().backward()
            numbers = [*scored.tolist(), float(model.lm_head.weight.grad.norm())]
            said = []
        except Exception:
            said, numbers = [traceback.format_exc()], []
    files = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "prefixtree"]
    return {"said": [*(str(w.message) for w in caught), *said], "numbers": numbers, "files": files}


def main() -> None:
    groups = json.load(sys.stdin)
    torch.set_num_threads(1)
    # what every fork would import for itself
    importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    # another package that has lost all its names, which a model without adapters needs not
    sys.modules["peft"] = ModuleType("peft")
    renaming = Renaming()
    sys.meta_path.insert(0, renaming)
    reports = []
    for renaming.gone in groups:
        reports.append(in_a_fork(score))
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
