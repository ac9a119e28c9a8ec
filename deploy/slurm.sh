#!/bin/bash
# Whale on Slurm: one torchrun on each host, which starts one rank for each of its GPUs.
#
#     sbatch deploy/slurm.sh train.py --steps 1000
#
# Hosts may have different numbers of GPUs: each torchrun counts its own. With heterogeneous hosts, ask for them as a heterogeneous job or by
# name (#SBATCH --nodelist=big1,small1) and leave --gpus-per-node out, where your site allows that.

#SBATCH --job-name=whale
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%j.out

set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: sbatch deploy/slurm.sh SCRIPT [ARGUMENTS]" >&2
    exit 2
fi

# rank 0 runs on the first host: all others must reach it by this name, on all ports
# not `| head -n 1`: scontrol may still be writing when head ends, and pipefail would end the job
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
FIRST_HOST=${HOSTS[0]}
export ENDPOINT=$FIRST_HOST:$((20000 + SLURM_JOB_ID % 20000))

# ranks that are started again must not read addresses of dead ones from the launcher's store (pytorch issue 135712)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# the interface between the hosts, where there are several (ip -br address):
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# how often all ranks start again after a failure; the script must call engine.load at its start
export RESTARTS=${RESTARTS:-0}
export BACKEND=static
if [ "$RESTARTS" -gt 0 ]; then BACKEND=c10d; fi # the one that lets ranks of all hosts meet again

# one shell on each host; $SLURM_NODEID is its number there
srun --kill-on-bad-exit=1 --wait=60 bash -c '
    devices=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
    if [ "$devices" -eq 0 ]; then devices=${SLURM_CPUS_ON_NODE:-1}; fi
    exec torchrun \
        --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$devices" \
        --rdzv-backend "$BACKEND" --rdzv-endpoint "$ENDPOINT" --rdzv-id "$SLURM_JOB_ID" \
        --max-restarts "$RESTARTS" --shutdown-timeout 5 "$@"
' bash "$@" &

# Slurm signals this shell 120 s before the time is over: the ranks get it too, so that a script that saves on SIGTERM can do so
srun_pid=$!
trap 'kill -TERM "$srun_pid"' TERM
wait "$srun_pid"
