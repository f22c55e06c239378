"""Two workers under Ray, as verl's trainers drive them: the same with both engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import tensordict_utils as tu

import prefixtree.integrations.verl.trainer  # noqa: F401  (registers the trainers)
from tests.integrations.verl.compare import difference
from tests.integrations.verl.ray_worker import CpuActorWorker
from tests.integrations.verl.runs import VOCABULARY, batch_of, rollouts
from tests.integrations.verl.test_hydra import FLAGS, STOCK, configuration

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A local Ray whose workers know the tests' modules."""
    variables = {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "tests.integrations.verl.cpu_platform",
        "TRANSFER_QUEUE_ENABLE": "1",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    ray.init(
        num_cpus=32,  # logical ones: placement groups keep theirs after their workers
        include_dashboard=False,
        runtime_env={"env_vars": variables},
        log_to_driver=False,
        object_store_memory=200 * 2**20,
    )
    yield
    ray.shutdown()


@ray.remote
def found_trainer(name: str) -> str:
    """The first thing that verl's task runner does."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    return get_trainer_cls(name).__name__


def test_the_variable_registers_the_trainer_where_ray_runs_it(cluster: None) -> None:
    # the one of examples/verl_grpo.sh
    variables = {
        "VERL_USE_EXTERNAL_MODULES": "prefixtree.integrations.verl.trainer",
        "VERL_PLATFORM": "nvidia",
    }
    with_it = found_trainer.options(runtime_env={"env_vars": variables})
    assert ray.get(with_it.remote("prefixtree_sync")) == "GroupedTrainerSync"
    variables["VERL_USE_EXTERNAL_MODULES"] = ""
    without = found_trainer.options(runtime_env={"env_vars": variables})
    with pytest.raises(ValueError, match="Unknown trainer 'prefixtree_sync'"):
        ray.get(without.remote("prefixtree_sync"))


# ---- a whole step of verl's trainer --------------------------------------------------------------


def samples(count: int) -> tuple[list[str], list[dict[str, Any]], list[dict[str, Any]]]:
    """Keys, fields and tags of rollouts as verl's agent loops store them."""
    rows = rollouts(31, groups=4, size=4)
    generator = torch.Generator().manual_seed(1)
    keys, fields, tags = [], [], []
    # in an order that has no group side by side
    for i in [j for start in range(4) for j in range(start, 16, 4)][:count]:
        prompt, response = rows["prompts"][i], rows["responses"][i]
        ids = torch.cat([prompt, response])
        scores = torch.zeros(len(response))
        scores[-1] = torch.randn((), generator=generator)
        keys.append(f"{rows['uid'][i]}_{i}_0")
        fields.append(
            {
                "prompts": prompt,
                "responses": response,
                "input_ids": ids,
                "position_ids": torch.arange(len(ids)),
                "response_mask": rows["response_mask"][i],
                "loss_mask": rows["response_mask"][i],
                "rm_scores": scores,
                "rollout_log_probs": torch.full((len(response),), -3.0),
                "multi_modal_inputs": {},
                "uid": rows["uid"][i],
                # masks that keep all, which verl's padding copies
                "extra_fields": {"sampling_masks": [[*range(VOCABULARY)]] * len(response)},
                "num_turns": 2,
            }
        )
        lengths = {"prompt_len": len(prompt), "response_len": len(response), "seq_len": len(ids)}
        tags.append({"status": "success", "global_steps": 1, **lengths})
    return keys, fields, tags


def trainer_step(mode: str, vendor: str, models: Path, flags: list[str], count: int) -> Any:
    """`_step_once` of a trainer of verl's over two workers of actor and reference.

    What makes rollouts is left out: the transfer queue holds what they would have put there.
    """
    config = configuration(
        models / "qwen3",
        [
            *flags,
            f"trainer.v1.trainer_mode={mode}",
            # verl pads with samples of 128 tokens
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=160",
            # one mini-batch: the whole batch, twice
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.ppo_epochs=2",
        ],
    )
    keys, fields, tags = samples(count)
    partition = "train"
    tq.kv_batch_put(
        keys=keys, partition_id=partition, fields=tu.list_of_dict_to_tensordict(fields), tags=tags
    )
    trainer = get_trainer_cls(mode).__new__(get_trainer_cls(mode))
    trainer.config, trainer.global_steps = config, 1
    trainer.trainer_mode = mode
    trainer.use_critic, trainer.use_reference_policy, trainer.ref_in_actor = False, True, False
    trainer.curr_step_profile = False
    trainer.tokenizer = SimpleNamespace(eos_token_id=1)
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: None)
    batch = tq.KVBatchMeta(keys=keys, tags=tags, partition_id=partition)
    trainer.replay_buffer = SimpleNamespace(sample=lambda **kwargs: (batch, {}))
    group = RayWorkerGroup(
        RayResourcePool(process_on_nodes=[2], use_gpu=False, max_colocate_count=1),
        RayClassWithInitArgs(ray.remote(CpuActorWorker), config=config.actor_rollout_ref),
        use_gpu=False,
        name_prefix=mode,
        device_name="cpu",
        worker_env={"VERL_ENGINE_VENDOR": vendor},
    )
    group.init_model()
    trainer.actor_rollout_wg = trainer.ref_policy_wg = group
    # outside of the transfer queue verl splits a batch among workers and joins what they give
    rows = rollouts(21, groups=4, size=4)
    data = batch_of(rows, compute_loss=False, temperature=0.9, global_token_num=None)
    scored = group.compute_log_prob(data)["log_probs"].unbind()
    spans = zip(scored, rows["prompts"], rows["responses"], strict=True)
    joined = [row[len(p) - 1 : len(p) + len(r) - 1].clone() for row, p, r in spans]
    metrics: dict[str, Any] = {}
    after = trainer._step_once(metrics, {}, sample_batch_size=4)
    parameters, engines = group.parameter_sums()[0], group.engine_name()
    tq.kv_clear(keys=after.keys, partition_id=partition)
    for worker in group.workers:
        ray.kill(worker)
    found = {"metrics": metrics, "parameters": parameters, "batch": after}
    return {**found, "joined": joined, "engines": engines}


@pytest.fixture
def transfer_queue(cluster: None) -> Iterator[None]:
    """verl's transfer queue, with one storage unit."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer").transfer_queue
    config.enable = True
    config.backend.SimpleStorage.num_data_storage_units = 1
    tq.init(config)
    yield
    tq.close()


@pytest.mark.full
def test_a_step_of_the_trainer(transfer_queue: None, models: Path) -> None:
    # two samples are missing: verl pads the batch, in the transfer queue
    stock = trainer_step("sync", "stock", models, STOCK, count=14)
    packed = trainer_step("prefixtree_sync", "prefixtree", models, FLAGS, count=14)
    assert len(stock["batch"]) == len(packed["batch"]) == 16
    assert set(stock["engines"]) == {"FSDPEngineWithLMHead"}
    assert set(packed["engines"]) == {"PackedActorEngine"}
    assert difference(stock["joined"], packed["joined"]) < 1e-5

    def groups(batch: Any) -> list[set[str]]:
        uids = [key.rsplit("_", 2)[0] for key in batch.keys]
        return [{u for u in uids[i : i + 8] if not u.startswith("pad")} for i in (0, 8)]

    here, there = groups(packed["batch"])
    assert len(here | there) == 4
    assert not here & there
    assert set.intersection(*groups(stock["batch"]))  # verl's own scatters them
    # the same samples, dealt out differently: the sum of their gradients is the same
    for name in (
        "actor/loss",
        "actor/grad_norm",
        "actor/kl_loss",
        "actor/pg_loss",
        "actor/entropy_loss",
    ):
        expected = stock["metrics"][name]
        assert packed["metrics"][name] == pytest.approx(expected, abs=1e-5), name
    assert packed["metrics"]["actor/entropy"] == pytest.approx(
        stock["metrics"]["actor/entropy"], abs=1e-5
    )
    for name, norm in stock["parameters"].items():
        assert abs(norm - packed["parameters"][name]) < 1e-5, name
    assert packed["metrics"]["prefixtree/divided_groups"] == 0
    # mini-batches with padding included
    assert packed["metrics"]["actor/prefixtree/replicated_over_packed"] > 1.3
    assert "perf/mfu/actor" in packed["metrics"]
