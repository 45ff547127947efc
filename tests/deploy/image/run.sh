#!/bin/bash
# run.sh [PYTEST OPTION...]: build the image, run it in a pod and test it there. Needs root, buildah and podman.
# Their storage is a directory of its own, so that this neither meets nor leaves anything in the machine's.
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd ../../.. && pwd)
store=$(mktemp -d /tmp/stopline-image.XXXXXX)
cat >"$store/storage.conf" <<C
[storage]
driver = "overlay"
graphroot = "$store/store"
runroot = "$store/run"
C
cat >"$store/containers.conf" <<'C'
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "crun"
[network]
network_backend = "netavark"
C
export CONTAINERS_STORAGE_CONF=$store/storage.conf CONTAINERS_CONF=$store/containers.conf
trap 'umount -q "$store/store/overlay" || true; rm -rf "$store"' EXIT
base=localhost/ci/python:3.13-slim-trixie
./base.sh "$base"
began=$SECONDS
./build.sh "$root" localhost/stopline:ci "$base" >/dev/null
echo "image built in $((SECONDS - began)) s"
./stand-ins.sh "$base" localhost/stopline:ci
cd "$root"
tests/deploy/image/alone.sh .venv/bin/python -m pytest tests/deploy/image/pod.py tests/deploy/image/compose.py -q -s "$@"
