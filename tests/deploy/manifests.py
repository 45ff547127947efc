"""What the tests of manifests share: rendering, the schemas of two Kubernetes versions, and Pod Security."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crds
import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
KUBECTL = Path(sys.executable).parent / "kubectl"
VERSIONS = ("1.29", "1.37")  # the oldest with native sidecars, and the newest that can be checked here

Manifest = dict[str, Any]

_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_TEMPLATES = {
    "Deployment": [("spec", "template")],
    "StatefulSet": [("spec", "template")],
    "DaemonSet": [("spec", "template")],
    "LeaderWorkerSet": [
        ("spec", "leaderWorkerTemplate", "leaderTemplate"),
        ("spec", "leaderWorkerTemplate", "workerTemplate"),
    ],
}


def kustomize(directory: Path) -> str:
    """What ``kubectl apply -k`` would apply."""
    result = subprocess.run([KUBECTL, "kustomize", directory], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def parsed(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


def pods(manifests: list[Manifest]) -> Iterator[Manifest]:
    """The pod templates in *manifests*."""
    for manifest in manifests:
        if manifest["kind"] == "Pod":
            yield manifest
        for path in _TEMPLATES.get(manifest["kind"], []):
            template = manifest
            for key in path:
                template = template[key]
            yield template


def containers(pod: Manifest) -> dict[str, Manifest]:
    spec = pod["spec"]
    return {c["name"]: c for c in (*spec.get("initContainers", []), *spec["containers"])}


def check_schemas(manifests: list[Manifest]) -> None:
    """Each against the strict schemas of both versions, or of its custom resource and its pod templates as Pods."""
    for manifest in manifests:
        if manifest["kind"] in (*crds.OPERATOR, "LeaderWorkerSet"):
            jsonschema.validate(manifest, crds.schema(manifest["kind"]))
            check_schemas([{"apiVersion": "v1", "kind": "Pod", **pod} for pod in pods([manifest])])
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)


def unresolved(manifests: list[Manifest]) -> set[str]:
    """Labels and annotations, of objects and of pods, in which something of a template is left."""
    described = [m["metadata"] for m in (*manifests, *pods(manifests))]
    texts = {t for d in described for key in ("labels", "annotations") for t in d.get(key, {}).values()}
    return {text for text in texts if re.search(r"\{\{|\}\}|<no value>|<nil>|%!|\$\(", text)}


def beyond_restricted(pod: Manifest) -> set[str]:
    """What of *pod* a namespace of Pod Security level restricted would refuse.

    Source: kubernetes.io/docs/concepts/security/pod-security-standards
    """
    spec, found = pod["spec"], set()
    found |= {key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)}
    found |= {f"volume {v['name']}" for v in spec.get("volumes", []) if not set(v) - {"name"} <= _VOLUMES}
    whole = spec.get("securityContext", {})
    for name, container in containers(pod).items():
        own = container.get("securityContext", {})
        both = whole | own
        wrong = {
            "privileged": own.get("privileged", False),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
            "capabilities": own.get("capabilities", {}).get("drop") != ["ALL"] or "add" in own["capabilities"],
            "runAsNonRoot": both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0,
            "seccompProfile": both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"),
            "hostPort": any("hostPort" in port for port in container.get("ports", [])),
        }
        found |= {f"{name}: {what}" for what, is_wrong in wrong.items() if is_wrong}
    return found
