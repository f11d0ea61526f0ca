#!/usr/bin/env bash
# Runs the pods of deploy/k8s as containers, with kubelet.py in place of Kubernetes, and disturbs runs:
#   sudo deploy/test_kubernetes.sh
# Needs the environment of `make setup`. deploy/engine.sh explains the variables ROOT, KEEP, WHEELS and MIRROR. CPU images
# stand in for those with CUDA; the trainer has two pods with a rank each.
source "$(dirname "$0")/engine.sh"
kubelets=()
clean_up() {
  kill "${kubelets[@]}"
  # shellcheck disable=SC2046 # one argument for each container
  docker rm --force $(docker ps --all --quiet)
  docker network rm kubelet
}
begin
docker network create kubelet >/dev/null

share=$engine/share
rm -rf "$share" && mkdir -p "$share"/{claims/lockstep-work/{models,data,runs},secrets,configs/run}
cp -r "$repository/deploy/quickstart/model" "$share/claims/lockstep-work/models/my-model"
"$repository/.venv/bin/lockstep" data arithmetic --out "$share/claims/lockstep-work/data" >/dev/null
chown -R root:10001 "$share/claims" && chmod -R g+rwX "$share/claims" && find "$share/claims" -type d -exec chmod g+s {} +
cp "$repository/deploy/k8s/run/run.yaml" "$share/configs/run"

# As a kubelet mounts a secret: links to a directory that is replaced as a whole, files that only the group can read.
mount_secret() { # ROLE
  local mount=$share/secrets/$1-tls version
  version=..$(date +%s%N)
  mkdir -p "$mount/$version"
  cp "$ROOT/certs/$1"/* "$mount/$version"
  chown -R root:10001 "$mount" && chmod 0440 "$mount/$version"/*
  ln -s "$version" "$mount/..new" && mv -T "$mount/..new" "$mount/..data"
  for file in ca.pem cert.pem key.pem; do ln -sf "..data/$file" "$mount/$file"; done
}
certs() { "$repository/.venv/bin/lockstep" certs "$@" --ca "$ROOT/certs/ca" >/dev/null; }
rm -rf "$ROOT/certs" && "$repository/.venv/bin/lockstep" certs init "$ROOT/certs/ca" >/dev/null
for role in rollout trainer reward coordinator; do
  certs issue $role --host $role --host "$role-0.$role" --host colocated-0.colocated --host 127.0.0.1 --out "$ROOT/certs/$role"
  mount_secret $role
done

printf '#!/bin/sh\nexec nsenter --mount --root --wd --target %s /usr/bin/docker "$@"\n' "$(cat "$engine/run/docker.pid")" >"$ROOT/docker"
chmod +x "$ROOT/docker"
kubelet() { # LOG ARGUMENTS...: in the background
  local log=$1
  shift
  "$repository/.venv/bin/python" "$repository/deploy/kubelet.py" --docker "$ROOT/docker" --root /share "$@" >"$ROOT/$log.log" 2>&1 &
  kubelets+=($!)
}
job() { # NAME [--arg=ARGUMENT...]
  docker rm --force run-0.coordinator >/dev/null
  kubelet "$1" "--arg=name=$1" --arg=trainer.num_ranks=2 --arg=num_steps=8 --arg=data.prompts_per_step=64 \
    --arg=data.max_prompt_tokens=16 --arg=rollout.completions_per_prompt=8 --arg=rollout.max_model_len=64 \
    --arg=rollout.sampling.max_tokens=8 --arg=trainer.max_tokens_per_microbatch=2048 --arg=trainer.optim.lr=3e-4 \
    --arg=checkpoint.save_freq=3 --arg=evaluation.eval_freq=8 "${@:2}" "$repository/deploy/k8s/run/job.yaml"
}
lockstep() {
  docker run --rm --user 10001 --group-add 10001 --workdir /work --volume /share/claims/lockstep-work:/work lockstep-coordinator:cpu "$@"
}
model_of() { sha256sum "$share/claims/lockstep-work/runs/$1/model/SHA256SUMS" | cut -c 1-16; }
until_in() { timeout "${3:-300}" sh -c "until grep -q '$2' '$ROOT/$1.log'; do sleep 0.5; done" || { echo "$1: no '$2'"; tail -5 "$ROOT/$1.log"; return 1; }; }
until_step() { timeout 400 sh -c "until '$ROOT/docker' logs run-0.coordinator 2>/dev/null | grep -q '^ *$1/8'; do sleep 0.5; done"; }

# Runs a Job to its end, disturbed after its fourth step. Prints how its pods ended and which model came out.
row() { # NAME DISTURBANCE
  job "$1"
  if [ -n "$2" ]; then
    until_step 4
    eval "$2" >/dev/null
  fi
  until_in "$1" '^run \(complete\|failed\)' 600
  lockstep verify "runs/$1" >"$ROOT/$1.verify" || { cat "$ROOT/$1.verify"; return 1; }
  printf '%-12s %s  %s\n' "$1" "$(model_of "$1")" "$(sed -n 's/^run-0.coordinator //p; s/^run \(.*\)/\1/p' "$ROOT/$1.log" | cut -c 1-90 | paste -s -d ';')"
  [ "$(model_of "$1")" = "$(model_of undisturbed)" ]
}
hang() { # CONTAINER: stops its service, but not the container
  kill -STOP "$(pgrep --parent "$(docker inspect --format '{{.State.Pid}}' "$1")")"
}

kubelet services --replicas trainer=2 --env NUM_NODES=2 "$repository"/deploy/k8s/base/{trainer,rollout,reward}.yaml
row undisturbed ''
row coordinator 'docker kill run-0.coordinator'
row rank-1 'docker kill trainer-1.trainer'
row drained 'docker stop trainer-0.trainer trainer-0'
row reward 'docker kill reward-0.reward; until_in services "reward-0.reward exit"; until_step 6; docker kill reward-1.reward'
row stopped 'docker stop --time 600 run-0.coordinator'
row hanging 'hang rollout-0.rollout'
until_in services 'rollout-0.rollout is killed: its livenessProbe failed'
certs renew "$ROOT/certs/trainer" && mount_secret trainer
row renewed ''
minutes "disturbed runs"

# A run that is not on the claim ends at its first checkpoint, where it can still be moved.
job elsewhere --arg=runs_dir=/home/lockstep/runs
until_in elsewhere 'exit 2: .*STORAGE_FAILED: the checkpoint of the trainer after step 3 is at /home/lockstep/runs/elsewhere'
kill "${kubelets[@]}" 2>/dev/null || true # those of Jobs have ended
kubelets=()
docker rm --force $(docker ps --quiet) >/dev/null

kubelet services "$repository/deploy/k8s/colocated/pod.yaml" "$repository/deploy/k8s/base/reward.yaml"
job colocated --arg=placement=colocated --arg=trainer.num_ranks=1 --arg=rollout.discovery=null \
  --arg=--trainer --arg=colocated-0.colocated:50051 --arg=--rollout --arg=colocated-0.colocated:50052
until_in colocated '^run complete' 600
lockstep verify runs/colocated
echo "kubernetes: ok"
minutes "all"
