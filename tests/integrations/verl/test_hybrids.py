"""Models with recurrent layers: the updates of verl's own engines, or of each sequence alone where
verl's fail (checkpoints with a vision encoder), one rank and two.

verl 0.9.1 asks for a transformers below 5.11, which does not hand recurrent layers the tree. Most
of these tests need the newer one of the main environment in its place (`make test-verl-hybrids`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging import version

from prefixtree.errors import UnsupportedError
from tests.integrations.verl.cases import HYBRID_CASES, HYBRID_SEQUENCE_PARALLEL_CASES
from tests.integrations.verl.compare import check_same
from tests.integrations.verl.runs import make_worker, run, run_ranks, save_model
from tests.support.full import asked_for, mostly
from tests.support.hybrid_configs import OLDEST_WITH_STATES

# every time
ONE = ("grpo, nemotron_h", "ppo, qwen3_next", "grpo, qwen3_5, text", "grpo, qwen3_5_moe, images")
TWO = (
    *("grpo, qwen3_5_text, lora", "ppo, qwen3_next, fsdp1"),
    "grpo, nemotron_h, long sequences",
)
TOGETHER = ("grpo, nemotron_h, two ranks a forest",)

SERVED = version.parse(transformers.__version__) >= version.parse(OLDEST_WITH_STATES)
needs_states = pytest.mark.skipif(not SERVED, reason=f"needs transformers {OLDEST_WITH_STATES}")


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrids")
    for settings in (HYBRID_CASES | HYBRID_SEQUENCE_PARALLEL_CASES).values():
        save_model(settings.model, folder)
    return folder


@pytest.fixture(scope="module")
def two_ranks(hybrids: Path) -> list[dict[Any, Any]]:
    together = asked_for(HYBRID_SEQUENCE_PARALLEL_CASES, TOGETHER)
    return run_ranks(hybrids, [*asked_for(HYBRID_CASES, TWO), *together])


@needs_states
@pytest.mark.parametrize("name", mostly(HYBRID_CASES, ONE))
def test_one_rank(name: str, hybrids: Path) -> None:
    settings = HYBRID_CASES[name]
    stock = run(settings.beside, hybrids, settings)
    packed = run("prefixtree", hybrids, settings)
    differences = check_same(stock, packed, settings)
    print("DIFF", name, {k: f"{v:.1e}" for k, v in differences.items()})


@needs_states
@pytest.mark.parametrize("name", mostly(HYBRID_CASES, TWO))
def test_two_ranks(name: str, two_ranks: list[dict[Any, Any]]) -> None:
    settings = HYBRID_CASES[name]
    for results in two_ranks:
        differences = check_same(
            results[name, settings.beside], results[name, "prefixtree"], settings
        )
        print("DIFF", name, {k: f"{v:.1e}" for k, v in differences.items()})


@needs_states
@pytest.mark.parametrize("name", mostly(HYBRID_SEQUENCE_PARALLEL_CASES, TOGETHER))
def test_two_ranks_compute_a_forest_together(name: str, two_ranks: list[dict[Any, Any]]) -> None:
    """Beside verl's own engine on ranks that compute the same batch each."""
    settings = HYBRID_SEQUENCE_PARALLEL_CASES[name]
    for results in two_ranks:
        assert results[name, "prefixtree"]["exchanges"].keys() == {"keys", "tails"}
        differences = check_same(
            results[name, settings.beside], results[name, "prefixtree"], settings
        )
        print("DIFF", name, {k: f"{v:.1e}" for k, v in differences.items()})


@pytest.mark.skipif(SERVED, reason="this transformers hands recurrent layers the tree")
def test_the_transformers_that_verl_asks_for_is_refused(tmp_path: Path) -> None:
    settings = HYBRID_CASES["grpo, qwen3_5_text"]
    save_model(settings.model, tmp_path)
    with pytest.raises(UnsupportedError, match=r'pip install "transformers>=5.17"'):
        make_worker("prefixtree", tmp_path / settings.model, settings)
