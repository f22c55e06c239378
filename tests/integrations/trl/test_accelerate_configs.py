"""accelerate's configurations in examples/configs: accelerate reads them, and the example runs."""

from __future__ import annotations

from pathlib import Path

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM

from tests.integrations.trl.launch import ROOT, start
from tests.integrations.trl.runs import parameters, squared_distance

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
    """With accelerate's launcher, two processes, in bfloat16, as the file says."""
    arguments = f"""
        accelerate.commands.launch --config_file {FSDP2} --num_processes 2 --main_process_port 0
        -m tests.integrations.trl.cpu_ranks examples/trl_grpo.py --tiny --output {tmp_path}
    """
    lines = start(arguments.split(), ACCELERATE_USE_CPU="true")
    sharded = [line.split()[1:] for line in lines if line.startswith("SHARDED")]
    assert len(sharded) == 2
    for kinds in sharded:
        assert {"FSDPQwen3ForCausalLM", "FSDPQwen3DecoderLayer"} <= set(kinds)
    assert sum("prefixtree/replication_ratio" in line for line in lines) == 4
    before, after = (
        parameters(AutoModelForCausalLM.from_pretrained(tmp_path / name)) for name in ("model", "")
    )
    assert squared_distance(before, after) > 1e-4
