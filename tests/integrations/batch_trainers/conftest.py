"""The trainers' own modules, with stand-ins for what their forwards import and do not call."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.integrations.batch_trainers.stand_ins import Finder

# what cannot be installed without a GPU, or brings a server
_STAND_INS = ("deepspeed", "flash_attn", "jaxtyping", "loguru")
# whose __init__ imports what no forward needs
_PACKAGES = (
    "openrlhf.models",
    "skyrl.backends.skyrl_train.workers",
    "skyrl.backends.skyrl_train.utils",
    "swift.rlhf_trainers",
)


@pytest.fixture(autouse=True, scope="session")
def stand_ins() -> Iterator[None]:
    finder = Finder(*_STAND_INS)
    for dotted in _PACKAGES:
        names = dotted.split(".")
        top = importlib.util.find_spec(names[0])
        assert top is not None and top.submodule_search_locations is not None
        where = list(top.submodule_search_locations)
        for depth in range(1, len(names) + 1):
            package = ModuleType(".".join(names[:depth]))
            package.__path__ = ["/".join([folder, *names[1:depth]]) for folder in where]
            sys.modules.setdefault(package.__name__, package)
            # found again as the folder of the next one
            if depth == 1:
                package.__spec__ = top
    # OpenRLHF compiles its entropy, for one size per batch
    with torch._dynamo.config.patch(disable=True):
        yield
    sys.meta_path.remove(finder)
