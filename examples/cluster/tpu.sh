#!/bin/bash
# Digits on all hosts of a Cloud TPU slice:   bash examples/cluster/tpu.sh NAME ZONE
# In Kubernetes (GKE) none of this is needed: TPU_WORKER_ID and TPU_WORKER_HOSTNAMES are set there, and found.
set -euo pipefail

# A host of a TPU VM learns its number and the others' addresses from the metadata server; 8476 is open between them.
read -r -d '' on_each_host <<'END' || true
ask() { curl -sf -H "Metadata-Flavor: Google" "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"; }
export TPU_WORKER_ID=$(ask agent-worker-number)
export TPU_WORKER_HOSTNAMES=$(ask worker-network-endpoints | tr , '\n' | awk -F: '{print $NF}' | paste -sd,)
cd jshard && jshard launch train configs/digits.yaml jshard.mesh.data=-1
END

gcloud compute tpus tpu-vm ssh "$1" --zone "$2" --worker=all --command "$on_each_host"
