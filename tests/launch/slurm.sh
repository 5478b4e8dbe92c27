#!/usr/bin/env bash
# examples/cluster/slurm.sbatch on a real Slurm, of four nodes on this machine: a job joins on four and loses a process. Two nodes
# go on, lose a task, are requeued, and lose bitwise what an undisturbed run loses. Needs root, on Debian or Ubuntu:
#     bash tests/launch/slurm.sh .venv/bin
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ ${SLURM_HERE:-} = '' ]]; then
    [[ $EUID = 0 ]] && unshare --mount --pid --fork --mount-proc true 2>/dev/null || { echo "slurm: only root can start Slurm here; nothing was run"; exit 0; }
    which slurmctld slurmd munged >/dev/null || { apt-get update -q && apt-get install -yq slurm-wlm munge; } >/dev/null 2>&1 ||
        { echo "slurm: slurm-wlm and munge can't be installed here; nothing was run"; exit 0; }
    # In namespaces of their own: the names of the nodes are seen by nobody else, and every process ends with this script.
    SLURM_HERE=$(mktemp -d) && chmod 755 "$SLURM_HERE" && trap 'rm -rf "$SLURM_HERE"' EXIT
    export SLURM_HERE PATH="$PWD/${1:-.venv/bin}:${1:-.venv/bin}:$PATH" PYTHONPATH=$PWD
    unshare --mount --pid --fork --kill-child --mount-proc bash "$0"
    exit
fi

here=$SLURM_HERE nodes=(jnode0 jnode1 jnode2 jnode3)
export SLURM_CONF=$here/slurm.conf SOAK_HERE=$here SOAK_PAUSE=0.4
mount --make-rprivate /
{ cat /etc/hosts && printf '127.0.0.1 %s\n' "${nodes[@]}"; } > "$here/hosts"
mount --bind "$here/hosts" /etc/hosts
cat > "$SLURM_CONF" <<END
ClusterName=jshard
SlurmctldHost=$(hostname)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$here/munge.socket,cred_expire=20
StateSaveLocation=$here/state
SlurmdSpoolDir=$here/spool.%n
SlurmctldPidFile=$here/slurmctld.pid
SlurmdPidFile=$here/%n.pid
SlurmctldLogFile=$here/slurmctld.log
SlurmdLogFile=$here/%n.log
SlurmctldPort=26817
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MessageTimeout=60
$(for n in "${!nodes[@]}"; do echo "NodeName=${nodes[n]} NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((26820 + n)) CPUs=8"; done)
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
mkdir "$here/state" && head -c 1024 /dev/urandom > "$here/key" && chmod 400 "$here/key"
munged --key-file="$here/key" --socket="$here/munge.socket" --pid-file="$here/munged.pid" --log-file="$here/munged.log" --seed-file="$here/seed"
slurmctld -i
for node in "${nodes[@]}"; do slurmd -N "$node"; done

fails() { echo "slurm: $1"; tail -n 30 "$here/job.log"; exit 1; }
within() {  # waits until the command that follows holds
    for _ in $(seq 1200); do "${@:2}" >/dev/null 2>&1 && return; sleep 0.2; done
    fails "not within 4 minutes: $1"
}
has() { grep -q "$1" "$here/job.log"; }
is() { [[ $(squeue -h -j "$job" -o %T) = "$1" ]]; }
ended() { [[ $(scontrol show job "$job" | grep -o 'JobState=[A-Z]*') =~ FAILED|COMPLETED|CANCELLED ]]; }
last() { grep -v '^srun: ' "$here/job.log" | tail -n 1; }

train=(tests/launch/soak.yaml steps=60 checkpoint=5)
jshard train "${train[@]}" output="$here/undisturbed" >/dev/null & undisturbed=$!
within "four nodes are idle" eval '[[ $(sinfo -h -t idle -o %D) = 4 ]]'
wait "$undisturbed"
job=$(sbatch --parsable --nodes=4 --output="$here/job.log" examples/cluster/slurm.sbatch "${train[@]}" output="$here/run")
within "four processes join and save" has 'saved step 5:'
kill -9 "$(cat "$here/pid.2")"
within "the job fails" ended
[[ $(last) = "rank 2 was ended by SIGKILL in step "* ]] || fails "the last word is not on rank 2, which was killed"
! has 'stack trace' || fails "JAX has printed a stack trace"
echo "slurm: a job of four nodes has lost a process, and its last word is: $(last)"

# Two nodes go on with what four have saved: JSHARD_RESTART says so in a new job, as SLURM_RESTART_COUNT does in one that is requeued.
job=$(JSHARD_RESTART=1 sbatch --parsable --output="$here/job.log" examples/cluster/slurm.sbatch "${train[@]}" output="$here/run")
within "two nodes go on" eval "has 'resumed from step' && [[ \$(grep -v saved '$here/job.log' | tail -n 1) = *'] step '* ]]"
kill -9 "$(ps -o ppid= -p "$(cat "$here/pid.0")" | tr -d ' ')"
within "the job fails again" ended
scontrol requeue "$job"
within "the job is requeued" is RUNNING
within "the job ends" ended
scontrol show job "$job" | grep -q 'JobState=COMPLETED' || fails "the job that was requeued has not completed"
python - "$here/undisturbed" "$here/run" <<'END'
import sys
from pathlib import Path

from tests.launch.soak import losses

undisturbed, run = (losses(Path(each)) for each in sys.argv[1:])
assert len(run) == 60 and run == undisturbed, "the losses are not those of an undisturbed run"
END
echo "slurm: on two nodes, and requeued, it has lost bitwise what an undisturbed run loses; restarts: $(grep -c 'resumed from step' "$here/job.log")"
