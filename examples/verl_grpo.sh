#!/usr/bin/env bash
# GRPO on GSM8K with verl, micro-batches packed into their prefix forests: one node of 8 GPUs.
#
#   pip install '.[verl]' vllm==0.24.0     # in a checkout of prefixtree; verl 0.9.1
#   examples/verl_grpo.sh [any verl setting=value ...]
#
# Packing needs only the settings marked (*); without them this is plain verl. The prompts of GSM8K
# are short: there are 1.1 to 1.4 replicated tokens per distinct one. Agents, whose rollouts share
# long prefixes, gain more. docs/verl.md says what to expect and how to check.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-4B}
DATA=${DATA:-$HOME/data/gsm8k}
GPUS=${GPUS:-8}

if [ ! -f "$DATA/train.parquet" ]; then
  python3 - "$DATA" <<'EOF'
"""GSM8K as verl reads it: the questions, and the final numbers for its rule-based reward."""
import sys
from pathlib import Path

import datasets

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
ask = " Let's think step by step and output the final answer after \"####\"."


def row(example, index, split):
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": example["question"] + ask}],
        "ability": "math",
        "reward_model": {
            "style": "rule",
            "ground_truth": example["answer"].split("####")[1].strip().replace(",", ""),
        },
        "extra_info": {"split": split, "index": index},
    }


for split in ("train", "test"):
    data = datasets.load_dataset("openai/gsm8k", "main", split=split)
    data = data.map(row, with_indices=True, fn_kwargs={"split": split})
    data.to_parquet(folder / f"{split}.parquet")
EOF
fi

packing=(
  # (*) the first registers the engines in every worker, the second switches packing on
  actor_rollout_ref.model.external_lib=prefixtree.integrations.verl
  +actor_rollout_ref.model.override_config.attn_implementation=prefixtree
  # (*) verl's "sync" trainer, but the rollouts of a prompt stay on one GPU. It must be registered
  # before verl looks for it, hence the variable, which Ray hands to all processes
  trainer.v1.trainer_mode=prefixtree_sync
  +ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=prefixtree.integrations.verl.trainer
  # a budget of distinct tokens: the longest sequence must fit
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
  # each GPU packs forests of its own; fused kernels are refused, and Liger Kernel's layers are
  # verified for some families only
  actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1
  actor_rollout_ref.model.use_fused_kernels=False
  actor_rollout_ref.model.use_liger=False
  # shuffling samples within a batch would scatter groups over mini-batches
  actor_rollout_ref.actor.shuffle=False
)

algorithm=(
  algorithm.adv_estimator=grpo
  algorithm.use_kl_in_reward=False
  actor_rollout_ref.actor.use_kl_loss=True
  actor_rollout_ref.actor.kl_loss_coef=0.001
  actor_rollout_ref.actor.kl_loss_type=low_var_kl
  actor_rollout_ref.actor.entropy_coeff=0
  actor_rollout_ref.actor.optim.lr=1e-6
  data.train_batch_size=256
  actor_rollout_ref.actor.ppo_mini_batch_size=128
)

model=(
  actor_rollout_ref.model.path="$MODEL"
  actor_rollout_ref.model.enable_gradient_checkpointing=True
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.ref.strategy=fsdp2
  actor_rollout_ref.ref.fsdp_config.param_offload=True
)

rollout=(
  data.train_files="$DATA/train.parquet"
  data.val_files="$DATA/test.parquet"
  data.max_prompt_length=512
  data.max_response_length=2048
  data.filter_overlong_prompts=True
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=16
  actor_rollout_ref.rollout.temperature=1.0
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6
)

run=(
  trainer.n_gpus_per_node="$GPUS"
  trainer.nnodes=1
  trainer.project_name=prefixtree
  trainer.experiment_name=grpo-gsm8k
  "trainer.logger=[console]"
  trainer.total_epochs=3
  trainer.save_freq=50
  trainer.test_freq=10
  # writes the rollouts, one file per step: `prefixtree report rollouts/step1.jsonl`
  +trainer.prefixtree_rollouts=rollouts
)

exec python3 -m verl.trainer.main_ppo \
  "${packing[@]}" "${algorithm[@]}" "${model[@]}" "${rollout[@]}" "${run[@]}" "$@"
