"""accelerate's configurations in examples/configs: accelerate reads them, and the example runs."""

from __future__ import annotations

from pathlib import Path

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import AutoModelForCausalLM

from tests.integrations.trl.launch import launch
from tests.integrations.trl.runs import parameters, squared_distance
from tests.support.spawn import ROOT

FSDP2 = ROOT / "examples" / "configs" / "fsdp2.yaml"


def test_fsdp2_is_read_by_accelerate() -> None:
    """Which refuses keys that it does not know, but not those of its plugin."""
    config = load_config_from_file(str(FSDP2))
    assert config.distributed_type == DistributedType.FSDP
    assert (config.mixed_precision, config.num_processes, config.num_machines) == ("bf16", 8, 1)
    fsdp = config.fsdp_config
    flags = {action.dest for action in launch_command_parser()._actions}
    assert set(fsdp) <= flags
    assert fsdp["fsdp_version"] == 2
    assert fsdp["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert fsdp["fsdp_state_dict_type"] == "FULL_STATE_DICT"
    assert fsdp["fsdp_reshard_after_forward"] is True
    for off in ("activation_checkpointing", "cpu_ram_efficient_loading", "offload_params"):
        assert fsdp[f"fsdp_{off}"] is False


def test_the_example_runs_with_fsdp2(tmp_path: Path) -> None:
    """Two processes, in bfloat16, as the file says to accelerate's launcher, and that to them."""
    script = str(ROOT / "examples" / "trl_grpo.py")
    options = ["--num_processes", "2", "--main_process_port", "0", "--config_file", str(FSDP2)]
    arguments, _, precision = _validate_launch_command(
        launch_command_parser().parse_args([*options, script])
    )
    arguments.mixed_precision = arguments.mixed_precision or precision
    environment = prepare_multi_gpu_env(arguments)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    given = (script, "--tiny", "--steps", "2", "--output", str(tmp_path))
    environment["ACCELERATE_USE_CPU"] = "true"
    found = launch("tests.integrations.trl.cpu_ranks", tmp_path, *given, **environment)
    assert {"FSDPQwen3ForCausalLM", "FSDPQwen3DecoderLayer"} <= set(found["sharded"])
    assert sum("prefixtree/replication_ratio" in log for log in found["logs"]) == 2
    before, after = (
        parameters(AutoModelForCausalLM.from_pretrained(tmp_path / name)) for name in ("model", "")
    )
    assert squared_distance(before, after) > 1e-4
