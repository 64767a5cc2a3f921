#!/bin/bash
# verl on trees on a Ray cluster that is there (`ray up`, KubeRay, `ray start`): two machines of eight GPUs.
#
#   RAY_ADDRESS=http://head:8265 bash examples/launch/ray_verl.sh
#
# verl starts trainers and samplers itself; treewise joins by its trainer mode (docs/verl.md). Model, prompts and
# checkpoints lie in /shared, which all machines see. The same line goes on with the newest checkpoint.
set -euo pipefail

ray job submit --runtime-env-json '{"env_vars": {"VERL_LOGGING_LEVEL": "INFO"}}' -- \
  python -m verl.trainer.main_ppo \
  data.train_files=/shared/prompts.parquet \
  data.val_files=/shared/prompts.parquet \
  actor_rollout_ref.model.path=/shared/my-model \
  actor_rollout_ref.model.use_fused_kernels=true \
  actor_rollout_ref.model.fused_kernel_options.impl_backend=torch \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.use_dynamic_bsz=true \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  algorithm.adv_estimator=grpo \
  trainer.v1.trainer_mode=treewise_sync \
  trainer.nnodes=2 \
  trainer.n_gpus_per_node=8 \
  trainer.default_local_dir=/shared/runs/first \
  trainer.resume_mode=auto
