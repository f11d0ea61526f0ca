# Starts a container engine from Debian's packages on a Debian host that has none, and builds the images of compose.yaml,
# without a registry. test_compose.sh and test_kubernetes.sh source this file, as root, with debootstrap installed.
#   ROOT    directory for engine, base image and images, 16 GB (/var/tmp/lockstep-deploy)
#   KEEP    if not empty, ROOT is kept for the next time; otherwise it is deleted
#   WHEELS  directory with the CPU build of torch, where PyTorch's index cannot be reached
#   MIRROR  Debian's mirror
set -euo pipefail
ROOT=${ROOT:-/var/tmp/lockstep-deploy} KEEP=${KEEP:-} WHEELS=${WHEELS:-} MIRROR=${MIRROR:-http://deb.debian.org/debian}
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
engine=$ROOT/engine base=python:3.11-slim-bookworm bridge=172.17.0.1 port=8765

make_engine() {
  [ -e "$ROOT/.engine" ] && return
  rm -rf "$engine"
  debootstrap --variant=minbase --include=ca-certificates,docker.io,docker-cli,docker-compose,docker-buildx,iptables \
    trixie "$engine" "$MIRROR" >"$ROOT/engine.log"
  mkdir -p "$engine/repository" "$engine/old" "$engine/share"
  touch "$ROOT/.engine"
}

# Python 3.11 of Debian 12, in place of Docker's image of the same version.
make_base() {
  [ -e "$ROOT/.base" ] && return
  rm -rf "$ROOT/base"
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$ROOT/base" "$MIRROR" >"$ROOT/base.log"
  ln -s /usr/bin/python3 "$ROOT/base/usr/local/bin/python"
  rm -rf "$ROOT"/base/var/cache/apt/archives/*.deb "$ROOT"/base/var/lib/apt/lists/*
  cp /etc/ssl/certs/ca-certificates.crt "$ROOT/base/etc/ssl/certs/" # a network may have an authority of its own
  printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$ROOT/base/etc/pip.conf"
  [ -z "$WHEELS" ] || printf 'find-links = http://%s:%s/\ntrusted-host = %s\n' $bridge $port $bridge >>"$ROOT/base/etc/pip.conf"
  touch "$ROOT/.base"
}

# The daemon gets a mount namespace of its own, whose root is $engine. It must be a mount point for `docker import`.
start_engine() {
  cp /etc/resolv.conf "$engine/etc/resolv.conf"
  forward=$(cat /proc/sys/net/ipv4/ip_forward)
  # shellcheck disable=SC2016 # the inner shell expands these
  setsid unshare --mount --propagation private bash -euc '
    mount --bind "$1" "$1"
    cd "$1"
    for name in proc sys dev; do mount --rbind "/$name" "$name"; done
    mount --bind -o ro "$2" repository
    pivot_root . old
    umount -l /old
    exec /usr/sbin/dockerd --data-root /data --exec-root /run/docker --pidfile /run/docker.pid
  ' bash "$engine" "$repository" >"$ROOT/dockerd.log" 2>&1 &
  for _ in $(seq 60); do in_engine docker info >/dev/null 2>&1 && return; sleep 1; done
  echo "the engine did not start: $ROOT/dockerd.log" >&2
  return 1
}

in_engine() {
  nsenter --mount --root --wd --target "$(cat "$engine/run/docker.pid")" \
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root sh -c 'cd /repository && exec "$@"' sh "$@"
}
docker() { in_engine docker "$@"; }
compose() { docker compose -f deploy/compose.yaml -f /local.yaml "$@"; }

# Builds the images from the repository as it is. Only the base image is another one.
build_images() {
  tar -C "$ROOT/base" --numeric-owner -c . | docker import -c 'ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin' - $base >/dev/null
  local digest
  digest=$(sed -n "s/^FROM \($base@[^ ]*\) .*/\1/p" "$repository/deploy/coordinator.Dockerfile" | head -1)
  cat >"$engine/local.yaml" <<END
x-build: &build { build: { additional_contexts: { "$digest": "docker-image://$base" } } }
services: { certificates: *build, rollout: *build, reward: *build, trainer: *build }
END
  if [ -n "$WHEELS" ]; then
    (cd "$WHEELS" && exec /usr/bin/python3 -m http.server $port --bind $bridge >/dev/null 2>&1) &
    http=$!
  fi
  compose --progress plain build >"$ROOT/build.log" 2>&1 || { tail -30 "$ROOT/build.log"; return 1; }
  docker image ls --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep lockstep
}

# dockerd leaves its bridge, its rules and a sysctl behind.
stop_engine() {
  [ -z "${http:-}" ] || kill "$http"
  if [ -e "$engine/run/docker.pid" ]; then
    kill "$(cat "$engine/run/docker.pid")"
    for _ in $(seq 60); do [ -e "$engine/run/docker.pid" ] || break; sleep 1; done
  fi
  local table chain
  for table in nat filter; do
    chroot "$engine" iptables-save -t $table | grep -E '^-A.*(DOCKER|docker0|172\.17\.)' | sed 's/^-A/-D/' |
      while read -r rule; do eval "chroot '$engine' iptables -t $table $rule"; done
    for action in -F -X; do
      for chain in $(chroot "$engine" iptables-save -t $table | sed -n 's/^:\(DOCKER[^ ]*\).*/\1/p'); do
        chroot "$engine" iptables -t $table $action "$chain"
      done
    done
  done
  chroot "$engine" iptables -P FORWARD ACCEPT
  ip link delete docker0
  echo "$forward" >/proc/sys/net/ipv4/ip_forward
  rmdir /sys/fs/cgroup/*/docker 2>/dev/null
  [ -n "$KEEP" ] || find "$ROOT" -mindepth 3 -maxdepth 3 -print0 | xargs -0 -P 8 -n 16 rm -rf
  [ -n "$KEEP" ] || rm -rf "$ROOT"
}

# Makes what is needed, then starts the engine and builds the images. At the script's end, whatever
# happened, its function `clean_up` is called and the engine stops.
begin() {
  mkdir -p "$ROOT"
  make_engine
  make_base
  trap finish EXIT
  start_engine
  minutes "engine and base image"
  build_images
  minutes "images"
}
finish() {
  local status=$?
  set +e
  clean_up >/dev/null 2>&1
  stop_engine >/dev/null 2>&1
  exit "$status"
}

minutes() { printf '%s %d:%02d\n' "$1" $((SECONDS / 60)) $((SECONDS % 60)); }
