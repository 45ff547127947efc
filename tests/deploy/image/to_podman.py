"""Rendered manifests become what podman 4.3 can run; what it lacks or ignores is tested on the manifests themselves.

Native sidecars become ordinary containers that come first; probes, ports and GPUs go; the pod shares the network of
the test. A volume of a kind that podman lacks is an error.
"""

from typing import Any

Manifest = dict[str, Any]

_KEPT = ("name", "image", "command", "args", "env", "volumeMounts", "securityContext", "resources")
_VOLUMES = {"name", "configMap", "emptyDir", "hostPath"}


def container(given: Manifest, images: dict[str, str]) -> Manifest:
    kept = {key: given[key] for key in _KEPT if key in given}
    kept |= {"image": images[given["name"]], "imagePullPolicy": "Never"}
    kept["resources"] = {
        what: {k: v for k, v in amounts.items() if "/" not in k} for what, amounts in given.get("resources", {}).items()
    }
    assert not any("subPathExpr" in m or "subPath" in m for m in kept.get("volumeMounts", []))
    return kept


def pod(name: str, template: Manifest, images: dict[str, str]) -> Manifest:
    """The pod *template* as a Pod; *images* by the name of the container."""
    spec = template["spec"]
    native = [c for c in spec.get("initContainers", []) if c.get("restartPolicy") == "Always"]
    unknown = [v["name"] for v in spec["volumes"] if set(v) - _VOLUMES]
    assert not unknown, f"podman has no such volumes: {unknown}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": template["metadata"]["labels"]},
        "spec": {
            "hostNetwork": True,
            "restartPolicy": "Always",
            "securityContext": spec.get("securityContext", {}),
            "volumes": spec["volumes"],
            "containers": [container(c, images) for c in (*native, *spec["containers"])],
        },
    }
