#!/bin/bash
# A run on several machines of a SLURM cluster: torchrun on each, one process for each GPU.
#
#   sbatch examples/launch/slurm.sh rl configs/rl.yaml --output_dir /shared/runs/first
#
# The environment, the model and the run's folder lie on a file system that all machines see. Five minutes before the
# job's time is over the run is asked to save and end, and the job goes back into the queue; --resume goes on with it,
# and begins where there is nothing to go on with.
#SBATCH --job-name=treewise
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=treewise-%j.log
set -euo pipefail

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280  # seconds that torchrun (2.12) waits for an iteration to end; 30 by default
environment="${TREEWISE_ENV:-$PWD/.venv}"
first_machine="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"

save_and_queue_again() {
  kill -TERM "$run"
  wait "$run" || true
  scontrol requeue "$SLURM_JOB_ID"
}
trap save_and_queue_again USR1

srun --kill-on-bad-exit=1 "$environment/bin/torchrun" \
  --nnodes "$SLURM_JOB_NUM_NODES" \
  --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" \
  --rdzv_id "$SLURM_JOB_ID" \
  --rdzv_backend c10d \
  --rdzv_endpoint "$first_machine:${TREEWISE_PORT:-29500}" \
  -m treewise "$@" --resume &
run=$!
wait "$run"
