#!/bin/bash
# stand-ins.sh BASE STOPLINE: the images that deploy/compose names, by their names: Stopline's own, Prometheus' and
# Alertmanager's of Debian's programs with the entry points of the originals, and llama.cpp's of a script.
set -euo pipefail
cd "$(dirname "$0")"
base=$1 stopline=$2
named() { sed -n "s|^ *image: \(.*$1:.*\)|\1|p" ../../../deploy/compose/compose.yaml; }
copy() { buildah copy --quiet "$@" >/dev/null; }
commit() { # commit CONTAINER NAME SETTING...
  local container=$1 name=$2
  shift 2
  buildah config --cmd '' "$container"
  buildah config "$@" "$container"
  buildah commit --quiet --rm "$container" "$name" >/dev/null
}

# Debian's programs look for their data and templates where Debian has them.
for program in prometheus alertmanager; do
  installed=$(command -v "prometheus-$program" || command -v "$program")
  container=$(buildah from --pull-never "$base")
  copy --chmod 755 "$container" "$installed" "/bin/$program"
  buildah run --isolation chroot "$container" -- install -d -o 65534 "/$program" /var/lib/prometheus
  buildah run --isolation chroot "$container" -- ln -s /prometheus /var/lib/prometheus/metrics2
  copy "$container" /usr/share/prometheus/alertmanager /usr/share/prometheus/alertmanager
  arguments="--config.file=/etc/$program/$program.yml"
  # beside loopback there is no network for peers
  [ $program = prometheus ] || arguments+=" --storage.path=/alertmanager --cluster.listen-address="
  commit "$container" "docker.io/$(named $program)" \
    --user 65534 --workingdir "/$program" --entrypoint "[\"/bin/$program\"]" --cmd "$arguments"
done

container=$(buildah from --pull-never "$base")
copy "$container" ../../fixtures/llamacpp/11434/metrics-idle.txt /models/metrics.txt
copy "$container" engine.py /app/engine.py
copy --chmod 755 "$container" llama-server /app/llama-server
commit "$container" "$(named llama.cpp)" --user 0

buildah tag "$stopline" "localhost/$(named stopline)"
