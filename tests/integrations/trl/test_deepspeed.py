"""DeepSpeed's ZeRO through TRL: our trainer against TRL's forward, on one and two processes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from accelerate import DeepSpeedPlugin
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env

from prefixtree.errors import UnsupportedError, refuse
from prefixtree.integrations.trl.distribution_refusals import DEEPSPEED_CONFIG
from tests.integrations.trl.distillation_runs import teacher
from tests.integrations.trl.launch import launch
from tests.integrations.trl.runs import save_model, tiny_config, tiny_hybrid, tiny_mixture
from tests.support.spawn import ROOT

# ranks start for every stage; see tests/README.md
pytestmark = pytest.mark.full

RANK = "tests.integrations.trl.deepspeed_rank"
COMPARED = {
    # stages 2 and 3 in one process as well (below)
    "stage 1": 1,
    "rloo": 3,
    "generation": 3,
    "unequal ranks": 2,
    "unequal ranks, tied": 3,
    "offload": 3,
    "hybrid": 3,
    "experts": 3,
    "lora 2": 2,
    "lora 3": 3,
}
DROPPED = {"dropout 2": 2, "dropout 3": 3}
# trainers other than GRPO's and RLOO's, and how many models they wrap
OTHERS = {
    "distillation 2": {"gkd": 2},
    "distillation 3": {"on policy": 2, "gkd": 2},
    "samples 2": {"dpo": 2, "reward": 1},
    "samples 3": {"dpo": 2, "sft": 1, "kto": 2, "reward": 1},
    "joined rows": {"sft": 1},
    "references, experts": {"dpo": 2, "kto": 2},
    "references, lora": {"dpo": 1, "kto": 1},
}
RESUMED = {"resume 2": 2, "resume 3": 3}
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert find_spec("deepspeed"), "needs DeepSpeed: rm -r .venvs/trl-*, then `make test-trl`"
    folder = save_model(tmp_path_factory.mktemp("deepspeed"))
    save_model(folder / "tied", tiny_config(tie_word_embeddings=True))
    save_model(folder / "hybrid", tiny_hybrid("qwen3_5_text"))
    save_model(folder / "experts", tiny_mixture())
    teacher().save_pretrained(folder / "teacher")
    return folder


@pytest.fixture(scope="module")
def results(models: Path) -> Results:
    """Of two ranks, which start once for all cases."""
    return launch(
        RANK,
        models,
        *(*COMPARED, *DROPPED, *OTHERS, *RESUMED, "bfloat16", "without hooks"),
        DS_ACCELERATOR="cpu",
    )


def assert_equal_runs(result: dict[str, Any]) -> None:
    print(result)
    assert result["head moved"] > 1e-3
    assert result["kl"] > 1e-5
    assert result["ratio"] > 1.4
    assert result["metrics"] < 1e-5, result["metric"]
    assert result["parameters"] < 1e-5


def assert_partitioned(result: dict[str, Any], stage: int, processes: int) -> None:
    """It was DeepSpeed, at that stage; between forwards, stage 3 leaves no weight whole."""
    assert result["processes"] == processes
    assert result["stage"] == stage
    assert set(result["wrappers"]) <= {"DeepSpeedEngine", "NoneType"}
    assert result["wrappers"][0] == "DeepSpeedEngine"
    assert result["partitioned"] == [float(stage == 3)] * len(result["partitioned"])


def check_others(result: dict[str, Any], wrapped: dict[str, int], stage: int) -> None:
    """All models are whole on every rank at stage 2, and in parts at stage 3."""
    assert result.keys() == wrapped.keys()
    for name, found in result.items():
        print(name, found)
        assert found["models"] == ["DeepSpeedEngine"] * wrapped[name]
        assert found["partitioned"] == float(stage == 3)
        assert found["moved"] > 1e-3 and found["ratio"] > 1.4
        assert found["metrics"] < 1e-5 and found["parameters"] < 1e-5


@pytest.mark.parametrize("case", COMPARED)
def test_runs_are_trls_own(results: Results, case: str) -> None:
    result = results[case]
    assert_equal_runs(result)
    assert_partitioned(result, COMPARED[case], processes=2)
    # an adapter's reference is the model without it; an lm_head beside 12 matrices is trained too
    references = result["wrappers"][1] == "DeepSpeedEngine"
    assert references is not case.startswith("lora")
    if case.startswith("lora"):
        assert result["trained"] == 13


def test_generation_layer_by_layer(results: Results) -> None:
    """`ds3_gather_for_generation=False`, under which TRL's own forward does not run."""
    assert_equal_runs(results["generation"]["layer by layer"])


@pytest.mark.parametrize("case", ["unequal ranks", "unequal ranks, tied"])
def test_a_rank_with_nothing_to_score(results: Results, case: str) -> None:
    scored = results[case]["scored"]
    assert scored[0] > 0 and scored[1] == 0


@pytest.mark.parametrize("case", DROPPED)
def test_shared_dropout_is_that_without_deepspeed(results: Results, case: str) -> None:
    """At stage 3 a model is partitioned before the callback shares its dropout."""
    result = results[case]
    assert_equal_runs(result)
    assert_partitioned(result, DROPPED[case], processes=2)
    assert result["beside"] == "DistributedDataParallel"
    assert result["other masks"] > 1e-2
    assert ("share_dropout" in result["later"]) == (DROPPED[case] == 3)


@pytest.mark.parametrize("case", OTHERS)
def test_other_trainers(results: Results, case: str) -> None:
    check_others(results[case], OTHERS[case], stage=2 if case.endswith("2") else 3)


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_is_the_whole_one(results: Results, case: str) -> None:
    result = results[case]
    print(result)
    assert_partitioned(result, RESUMED[case], processes=2)
    assert result["steps"] == 4
    assert result["second half"] > 1e-4
    assert result["parameters"] < 1e-6
    # what was saved loads with transformers alone
    assert result["attention"] == "sdpa"
    assert result["loaded"] < 1e-6


def test_bfloat16(results: Results) -> None:
    """As near to a float32 run as TRL's own forward; DeepSpeed trains float32 copies."""
    result = results["bfloat16"]
    print(result)
    assert_partitioned(result, 3, processes=2)
    assert result["dtypes"] == ["torch.bfloat16"]
    assert 0.5 * result["theirs"] < result["ours"] < 1.5 * result["theirs"]


def test_partitioned_parameters_that_nothing_gathers(results: Results) -> None:
    """A model that ZeRO-3 partitioned while loading it, scored before DeepSpeed has it."""
    result = results["without hooks"]
    assert "model.embed_tokens.weight is partitioned by DeepSpeed ZeRO-3" in result["message"]
    assert "deepspeed.zero.GatheredParameters" in result["message"]
    assert result["error"] == 0.0


def test_one_process(models: Path) -> None:
    cases = "stage 2", "stage 3", "references, kept"
    found = launch(RANK, models, *cases, processes=1, DS_ACCELERATOR="cpu")
    for stage in (2, 3):
        assert_equal_runs(found[f"stage {stage}"])
        assert_partitioned(found[f"stage {stage}"], stage, processes=1)
    # on one, as each rank keeps those of data in memory in a folder of its own
    check_others(found["references, kept"], {"dpo": 1, "kto": 1}, stage=3)


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerates_configurations(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch` reads them, and hands them to the ranks."""
    file = ROOT / "examples" / "configs" / f"zero{stage}.yaml"
    # accelerate warns if its own port is taken
    options = ["--main_process_port", "0", "--config_file", str(file)]
    arguments = launch_command_parser().parse_args([*options, "trl_grpo.py"])
    arguments, defaults, precision = _validate_launch_command(arguments)
    assert defaults.distributed_type == "DEEPSPEED" and arguments.use_deepspeed
    arguments.deepspeed_fields_from_accelerate_config = list(defaults.deepspeed_config)
    arguments.mixed_precision = arguments.mixed_precision or precision
    _, environment = prepare_deepspeed_cmd_env(arguments)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == stage
    assert plugin.zero3_init_flag is plugin.zero3_save_16bit_model is (stage == 3)
    refuse(DEEPSPEED_CONFIG, plugin.deepspeed_config)
    # the comments are right
    with monkeypatch.context() as changed:
        changed.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu")
        refuse(DEEPSPEED_CONFIG, DeepSpeedPlugin().deepspeed_config)
        changed.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "nvme")
        with pytest.raises(UnsupportedError, match="offload_optimizer to 'nvme'"):
            refuse(DEEPSPEED_CONFIG, DeepSpeedPlugin().deepspeed_config)
