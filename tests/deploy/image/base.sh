#!/bin/bash
# base.sh IMAGE: a stand-in for python:3.13-slim-trixie made of Debian's packages, where no registry can be reached.
set -euo pipefail
IMAGE=$1
CACHE=${CACHE:-/var/cache/ci-base}
TAR=$CACHE/trixie-python.tar
buildah inspect --type image "$IMAGE" >/dev/null 2>&1 && exit 0
mkdir -p "$CACHE"
if ! [ -s "$TAR" ]; then
  MIRROR=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m1 '/debian/$')
  mmdebstrap --quiet --format=tar --variant=minbase \
    --include=ca-certificates,python3-pip,python3-venv,python-is-python3 \
    --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Check-Valid-Until "false"' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --customize-hook='rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/* "$1"/usr/lib/python3*/EXTERNALLY-MANAGED' \
    trixie "$TAR.part" "$MIRROR"
  mv "$TAR.part" "$TAR"
fi
container=$(buildah from scratch)
buildah add --quiet "$container" "$TAR" / >/dev/null
buildah config --env LANG=C.UTF-8 --env PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin --cmd python3 "$container"
buildah commit --quiet --rm "$container" "$IMAGE" >/dev/null
