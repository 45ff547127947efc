#!/bin/bash
# build.sh CONTEXT TAG BASE: the real Dockerfile on BASE; the machine's authorities and pip's index are lent to it.
set -euo pipefail
CONF=$(mktemp)
trap 'rm -f "$CONF"' EXIT
CA=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\ndisable-pip-version-check = true\n' >"$CONF"
if index=$(python3 -m pip config get global.index-url 2>/dev/null); then echo "index-url = $index" >>"$CONF"; fi
buildah bud --quiet --isolation chroot --network host --layers=false --pull-never --format docker \
  --volume "$CA:/etc/ssl/certs/ca-certificates.crt:ro" --volume "$CONF:/etc/pip.conf:ro" \
  --build-arg "BASE_IMAGE=$3" --tag "$2" "$1"
