#!/usr/bin/env bash
# One job over several hosts that may have different numbers of devices: run this on every host.
#
#     on big1     bash examples/two_hosts.sh 0 3 big1 examples/quickstart.py
#     on small1   bash examples/two_hosts.sh 1 1 big1 examples/quickstart.py
#
# The words: number of this host, devices that it gives to the job, name of host 0 as all hosts know it, then the script and its arguments.
# Settings: HOSTS (2), PORT (29500, free on host 0). docs/hosts.md says more; deploy/ has templates for Slurm and Kubernetes.

set -euo pipefail

if [ $# -lt 4 ]; then
    echo "usage: bash examples/two_hosts.sh HOST_NUMBER DEVICES_HERE HOST_0 SCRIPT [ARGUMENTS]" >&2
    exit 2
fi

number=$1 devices=$2 host_0=$3
shift 3

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# the interface between the hosts, where there are several (ip -br address):
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

exec torchrun --nnodes "${HOSTS:-2}" --node-rank "$number" --nproc-per-node "$devices" \
    --master-addr "$host_0" --master-port "${PORT:-29500}" --shutdown-timeout 5 "$@"
