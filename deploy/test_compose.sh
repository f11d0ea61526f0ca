#!/usr/bin/env bash
# Runs compose.yaml on a Debian host without engine or registry, and disturbs runs: `sudo deploy/test_compose.sh`.
# deploy/engine.sh explains the variables ROOT, KEEP, WHEELS and MIRROR. No file of the repository is changed.
source "$(dirname "$0")/engine.sh"
clean_up() {
  compose down --volumes
}
begin

train() { # NAME: the documented command with other settings
  compose run --rm -T --name "run-$1" coordinator rollout:50051 reward:50051 trainer:50051 \
    "name=$1" num_steps=8 checkpoint.save_freq=3 evaluation.eval_freq=8
}
in_runs() { compose run --rm -T --no-deps --entrypoint "$1" coordinator "${@:2}"; }
model_of() { sha256sum "$engine/data/volumes/lockstep_runs/_data/$1/model/SHA256SUMS" | cut -c 1-16; }

# Disturbs a run after its fourth step, expects an exit code, repairs and resumes with the same command.
disturb() { # NAME CODE DISTURB REPAIR
  local log=$ROOT/$1.log code=0 began
  train "$1" >"$log" 2>&1 &
  local running=$!
  timeout 300 sh -c "until grep -q '^ *4/8' '$log'; do sleep 0.5; done"
  began=$SECONDS
  eval "$3" >/dev/null
  wait $running || code=$?
  local took=$((SECONDS - began))
  [ "$code" = "$2" ] || { echo "$1: exit code $code, not $2"; tail -5 "$log"; return 1; }
  eval "$4" >/dev/null 2>&1
  train "$1" >"$log.2" 2>&1 || { tail -5 "$log.2"; return 1; }
  in_runs lockstep verify "runs/$1" >"$log.3" || { cat "$log.3"; return 1; }
  printf '%-12s exit %-3s after %2d s  %s  %s\n' "$1" "$code" $took "$(model_of "$1")" \
    "$(sed -n 's/^lockstep: error: \([A-Z_]*\):.*/\1/p' "$log" | tail -1)"
  [ "$(model_of "$1")" = "$(model_of undisturbed)" ]
}

compose up --abort-on-container-exit coordinator | tail -40
compose ps -a --format '{{.Service}} {{.Status}}'
in_runs lockstep verify runs/quickstart
if compose logs rollout | grep 'Failed to load weights'; then exit 1; fi
compose cp coordinator:/work/runs/quickstart/model /model 2>/dev/null
(cd "$engine/model" && sha256sum --check --quiet SHA256SUMS)
minutes "quickstart"

compose up --detach --wait rollout reward trainer 2>/dev/null
[ "$(compose ps --format '{{.Health}}' rollout reward trainer | sort -u)" = healthy ]
train undisturbed >"$ROOT/undisturbed.log"
printf '%-12s exit 0                %s\n' undisturbed "$(model_of undisturbed)"
disturb trainer 2 'docker kill lockstep-trainer-1' 'compose up --detach --wait trainer'
disturb rollout 2 'docker kill lockstep-rollout-1' 'compose up --detach --wait rollout'
disturb cut-off 2 'docker network disconnect lockstep_default lockstep-rollout-1' \
  'docker network connect --alias rollout lockstep_default lockstep-rollout-1'
disturb coordinator 137 'docker kill run-coordinator' true
disturb stopped 3 'docker stop --time 600 run-stopped' true
minutes "disturbed runs"

# A renewed certificate is used by running services.
certificates=$engine/data/volumes/lockstep_certificates/_data
cp "$certificates/trainer/cert.pem" "$ROOT"
compose run --rm -T certificates >/dev/null
if cmp --quiet "$certificates/trainer/cert.pem" "$ROOT/cert.pem"; then exit 1; fi
train renewed >"$ROOT/renewed.log"
[ "$(model_of renewed)" = "$(model_of undisturbed)" ]

# Code of samples runs in a sandbox with the profile, and not without.
sandboxed() {
  echo '{}' | docker run --rm --interactive --network none --cap-drop ALL --security-opt no-new-privileges "$@" \
    --entrypoint python lockstep-reward:cpu -m services.reward.probe sandbox
}
sandboxed | grep -q error
sandboxed --security-opt seccomp=deploy/seccomp.json | grep -qv error
echo "compose: ok"
minutes "all"
