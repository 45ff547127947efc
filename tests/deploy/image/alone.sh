#!/bin/bash
# alone.sh COMMAND...: COMMAND with mounts and a network (loopback only) of its own, in which podman can run pods.
set -euo pipefail
exec unshare --mount --net --propagation private bash -c '
  ! mountpoint -q /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified
  ip link set lo up
  exec "$@"' _ "$@"
