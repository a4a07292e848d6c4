#!/bin/bash
# trueup on several nodes of a Slurm cluster: one torchrun per node, which starts one rank per GPU.
#
#     sbatch recipes/slurm.sh calibrate MODEL --data images/ --images 50000 -o cal.trueup.safetensors
#
# The run directory (FILE.run, or --run) has to be on a disk that all nodes see, if a job that was ended is to
# go on with what every node has done. A rank that dies is started again; a job that Slurm ends and requeues goes
# on, on as many nodes as it gets.
#SBATCH --job-name=trueup
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / ranks > 0 ? SLURM_CPUS_PER_TASK / ranks : 1))}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or a node that was lost and comes back cannot join the others

srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv-endpoint "$head:$port" \
    -m trueup "$@"
