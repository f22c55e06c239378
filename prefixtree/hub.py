"""Models and tokenizers as transformers finds them: folders, files, names on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefixtree.errors import InputError


def load_config(model: str | Path) -> Any:
    """The configuration of a folder, of a config.json or of a name on the Hugging Face hub.

    Raises:
        InputError: no such model, or a configuration that transformers does not read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(model))
    except Exception as problem:
        raise InputError(explain("--model", model, problem)) from None


def explain(option: str, name: str | Path, problem: BaseException) -> str:
    """One line on why transformers or torch could not take `name`, the value of `option`."""
    if Path(name).exists():
        return f"{option} {name}: {first_line(problem)}"
    kinds = {type(p).__name__ for p in _chain(problem)}
    if "HFValidationError" in kinds:
        return (
            f"{option} {name}: does not exist; expected a folder, a file of one, or a name on the "
            "Hugging Face hub such as Qwen/Qwen3-0.6B"
        )
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled"}:
        from huggingface_hub import constants

        why = f"no connection to {constants.ENDPOINT}"
        if constants.is_offline_mode():
            why = "HF_HUB_OFFLINE is set"
        return (
            f"{option} {name}: no such folder or file; as a name on the Hugging Face hub it is not "
            f"in the cache ({constants.HF_HUB_CACHE}) and cannot be downloaded ({why})"
        )
    return f"{option} {name}: {first_line(problem)}"


def first_line(problem: BaseException) -> str:
    """The first two lines of a message that say something, as one."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(problem).__name__


def _chain(problem: BaseException | None) -> Iterator[BaseException]:
    while problem is not None:
        yield problem
        problem = problem.__cause__ or problem.__context__
