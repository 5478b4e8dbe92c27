#!/bin/bash
# Digits in four processes under Open MPI:   bash examples/cluster/openmpi.sh [hosts]
set -euo pipefail

# Open MPI's variables say who is who. Over several hosts give them by name, and where the first process is:
#     bash examples/cluster/openmpi.sh node1:2,node2:2
if [[ $# -gt 0 ]]; then
    first=${1%%[:,]*}
    exec mpirun --host "$1" -np 4 -x JAX_COORDINATOR_ADDRESS="$first:8476" jshard train configs/digits.yaml
fi
exec mpirun -np 4 jshard train configs/digits.yaml
