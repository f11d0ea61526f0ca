#!/usr/bin/env bash
# Runs slurm/lockstep.sbatch on a cluster of four slurmd on this host with made-up GPUs: `sudo deploy/test_slurm.sh`.
# Needs Debian's slurmctld, slurmd, slurm-client and munge, and the environment of `make setup`. ROOT is a directory for
# its files (/var/tmp/lockstep-slurm), which is deleted, unless KEEP is set.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
ROOT=${ROOT:-/var/tmp/lockstep-slurm} KEEP=${KEEP:-}
# The nodes' names and Slurm's directories are only seen in a mount namespace of this script.
[ -n "${INSIDE:-}" ] || INSIDE=1 exec unshare --mount --propagation private "$0" "$@"
export PATH=$repository/.venv/bin:$PATH SLURM_CONF=$ROOT/slurm.conf
rm -rf "$ROOT"
mkdir -p "$ROOT"/{munge,state,spool} && cd "$ROOT"
{ cat /etc/hosts; for n in 1 2 3 4; do echo "127.0.1.$n node$n"; done; } >hosts
mount --bind hosts /etc/hosts
# Clusters have such long ones. The kernel limits the path of a socket to 107 characters.
TMPDIR=$ROOT/$(printf 't%.0s' {1..90})
export TMPDIR && mkdir "$TMPDIR"
touch gpu0 gpu1
cat >slurm.conf <<END
ClusterName=test
SlurmctldHost=$(hostname)(127.0.1.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$ROOT/munge/socket
CryptoType=crypto/munge
StateSaveLocation=$ROOT/state
SlurmdSpoolDir=$ROOT/spool/%n
SlurmctldPidFile=$ROOT/slurmctld.pid
SlurmdPidFile=$ROOT/slurmd-%n.pid
SlurmctldLogFile=$ROOT/slurmctld.log
SlurmdLogFile=$ROOT/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=5
GresTypes=gpu
NodeName=node[1-4] NodeHostname=$(hostname) NodeAddr=127.0.1.[1-4] Port=[17001-17004] CPUs=$(nproc) RealMemory=2000 Gres=gpu:2
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
END
echo "NodeName=node[1-4] Name=gpu File=$ROOT/gpu[0-1]" >gres.conf
dd if=/dev/urandom of=munge.key bs=1k count=1 status=none && chmod 400 munge.key
finish() {
  status=$?
  set +e
  [ ! -e slurmctld.pid ] || timeout 20 scancel --user root
  sleep 5
  for file in slurmd-*.pid slurmctld.pid munge/pid; do [ ! -e "$file" ] || kill "$(cat "$file")"; done
  umount /etc/hosts
  cd /
  [ -n "$KEEP" ] || rm -rf "$ROOT"
  exit "$status"
}
trap finish EXIT
munged --force --key-file="$ROOT/munge.key" --socket="$ROOT/munge/socket" --pid-file="$ROOT/munge/pid" \
  --log-file="$ROOT/munge/log" --seed-file="$ROOT/munge/seed"
slurmctld
for n in 1 2 3 4; do slurmd -N "node$n"; done
timeout 60 bash -c 'until [ "$(sinfo --noheader --format %D --states idle)" = 4 ]; do sleep 1; done'
sinfo --version

lockstep certs init ca >/dev/null
hosts=(); for n in 1 2 3 4; do hosts+=(--host "node$n"); done
for role in rollout trainer reward coordinator; do lockstep certs issue $role --ca ca "${hosts[@]}" --out certs/$role >/dev/null; done
lockstep data arithmetic --out data >/dev/null
cp -r "$repository/deploy" .

submit() { # NAME OPTIONS...: prints the number of the job
  local name=$1
  shift
  sbatch --parsable --cpus-per-task="$(nproc)" --gpus-per-node=1 --signal=B:USR1@60 "$@" \
    deploy/slurm/lockstep.sbatch "$ROOT/certs" deploy/runs/quickstart.yaml "name=$name" num_steps=8 \
    data.train=data/train.parquet data.eval.held-out=data/test.parquet checkpoint.save_freq=3 evaluation.eval_freq=8
}
until_step() { timeout 400 sh -c "until grep -q '^ *$2/8' lockstep-$1.log 2>/dev/null; do sleep 0.5; done"; }
ended() { # JOB: waits, and prints state and exit code
  timeout 600 bash -c "while squeue --noheader --job $1 2>/dev/null | grep -q .; do sleep 1; done" || true
  scontrol show job "$1" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p; s/.*ExitCode=\([0-9]*\):.*/\1/p' | paste -s -d ' '
}
row() { # NAME STATE: with the seconds since the last row, and the model
  printf '%-12s %-14s %3d s  %s\n' "$1" "$2" $((SECONDS - ${last:-0})) "$(sha256sum "runs/$1/model/SHA256SUMS" 2>/dev/null | cut -c 1-16)"
  last=$SECONDS
}
same() { cmp "runs/$1/model/SHA256SUMS" runs/undisturbed/model/SHA256SUMS; }

job=$(submit undisturbed)
row undisturbed "$(ended "$job")"
if grep -q Traceback "lockstep-$job.log"; then exit 1; fi

# scancel of the batch shell only: the run stops after its step, and the same command resumes it.
job=$(submit stopped)
until_step "$job" 4
scancel --batch --signal TERM "$job"
row stopped "$(ended "$job")"
job=$(submit stopped)
row stopped "$(ended "$job")"
same stopped

# What Slurm sends before the time limit: the job is queued again and goes on by itself. On two nodes with two GPUs each
# there are as many ranks and replicas as on four with one.
job=$(submit limit --nodes=2 --gpus-per-node=2)
until_step "$job" 4
scancel --batch --signal USR1 "$job"
row limit "$(ended "$job")"
grep -q 'stopping after this step' "lockstep-$job.log"
same limit

# A replica is killed: the job ends, and does not wait for it.
job=$(submit killed)
until_step "$job" 4
scancel --signal KILL "$(squeue --steps --job "$job" --noheader --format '%i %N' | sed -n 's/ node3$//p')"
row killed "$(ended "$job")"
job=$(submit killed)
row killed "$(ended "$job")"
same killed

# A service that cannot start ends the job at once.
job=$(submit broken)
mv certs/reward certs/reward.away
row broken "$(ended "$job")"
mv certs/reward.away certs/reward
{ bash deploy/slurm/lockstep.sbatch 2>&1 || true; } | grep -q '^usage: sbatch'
echo "slurm: ok"
