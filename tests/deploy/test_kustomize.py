"""The components of deploy/kustomize, as they are rendered: every pod gets the sidecar, and nothing that holds it back."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from manifests import (
    DEPLOY,
    KUBECTL,
    Manifest,
    beyond_restricted,
    check_schemas,
    containers,
    kustomize,
    parsed,
    pods,
    unresolved,
)

from exporter import __version__, config

EXAMPLES = sorted(p.name for p in (DEPLOY / "kustomize/examples").iterdir())
KINDS = ("Deployment", "StatefulSet")
VARIANTS = ("sidecar", "sidecar-plain", "sidecar-kube-log", "sidecar-host-log")


def server(kind: str) -> Manifest:
    """The least that somebody may have already; as restricted as can be."""
    template = {
        "metadata": {"labels": {"app": "engine"}},
        "spec": {
            "initContainers": [{"name": "download", "image": "download:1", "securityContext": RESTRICTED}],
            "containers": [
                {"name": "server", "image": "engine:1", "command": ["serve", "model"], "securityContext": RESTRICTED}
            ],
        },
    }
    spec = {"selector": {"matchLabels": {"app": "engine"}}, "template": template}
    if kind == "StatefulSet":
        spec["serviceName"] = "engine"
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": "engine"}, "spec": spec}


RESTRICTED = {
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def write(directory: Path, variant: str, manifest: Manifest, **more: object) -> None:
    (directory / "server.yaml").write_text(yaml.safe_dump(manifest))
    component = os.path.relpath((DEPLOY / "kustomize" / variant).resolve(), directory.resolve())
    settings = {"resources": ["server.yaml"], "components": [component], **more}
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(settings))


@pytest.fixture(params=[(v, k) for v in VARIANTS for k in KINDS], ids="-".join)
def rendered(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, list[Manifest]]:
    """One line added to what was there: the name of the variant, and what comes of it."""
    variant, kind = request.param
    write(tmp_path, variant, server(kind))
    return variant, parsed(kustomize(tmp_path))


@pytest.fixture(scope="module", params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param, kustomize(DEPLOY / "kustomize/examples" / request.param)


def check_sidecar(pod: Manifest, *, native: bool) -> None:
    """What podman, on which the image is tried, would not notice."""
    sidecar = containers(pod)["stopline"]
    assert (sidecar in pod["spec"].get("initContainers", [])) is native
    assert sidecar.get("restartPolicy") == ("Always" if native else None)
    assert not {"readinessProbe", "startupProbe", "lifecycle"} & set(sidecar)  # each can hold the server back
    assert not any("/" in str(name) for amounts in sidecar["resources"].values() for name in amounts)  # takes no GPU
    assert sidecar["resources"]["requests"] == sidecar["resources"]["limits"]
    assert sidecar["securityContext"]["readOnlyRootFilesystem"]
    assert sidecar["ports"] == [{"name": "stopline", "containerPort": config.DEFAULT_PORT}]
    assert pod["metadata"]["labels"]["stopline"] in ("sidecar", "worker")
    volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
    for container in containers(pod).values():
        mounts = container.get("volumeMounts", [])
        assert {m["name"] for m in mounts} <= set(volumes) | {"models"}
        assert not any("subPath" in m for m in mounts)  # would never be updated
    assert volumes["stopline-settings"] == {"name": "stopline-settings", "configMap": {"name": "stopline"}}
    read_only = {m["mountPath"]: m.get("readOnly", False) for m in sidecar["volumeMounts"]}
    assert [path for path, only in read_only.items() if not only] == ["/var/lib/stopline"]


def test_every_variant_is_known_to_both_versions_of_kubernetes(rendered: tuple[str, list[Manifest]]) -> None:
    check_schemas(rendered[1])


def test_one_line_adds_the_sidecar_and_leaves_the_rest(rendered: tuple[str, list[Manifest]]) -> None:
    variant, manifests = rendered
    (pod,) = pods(manifests)
    check_sidecar(pod, native=variant != "sidecar-plain")
    assert {"download", "server", "stopline"} == set(containers(pod))
    assert pod["metadata"]["labels"]["app"] == "engine"
    assert "PodTemplate" not in {m["kind"] for m in manifests}
    engine = containers(pod)["server"]
    shares = "log" not in variant
    assert engine["command"] == [*(WITH_LOG if shares else []), "serve", "model"]
    assert bool(engine.get("volumeMounts")) is shares


WITH_LOG = ["/bin/sh", "/etc/stopline/with-log", "/var/log/engine/server.log"]


def test_pod_security_is_kept_but_for_the_host_path(rendered: tuple[str, list[Manifest]]) -> None:
    variant, manifests = rendered
    (pod,) = pods(manifests)
    wanted = {"volume stopline-pod-log", "stopline: runAsNonRoot"} if variant == "sidecar-host-log" else set()
    assert beyond_restricted(pod) == wanted


def test_the_api_is_reached_with_the_least_rights_and_a_token_in_the_sidecar_alone(tmp_path: Path) -> None:
    write(tmp_path, "sidecar-kube-log", server("Deployment"))
    manifests = {m["kind"]: m for m in parsed(kustomize(tmp_path))}
    assert manifests["Role"]["rules"] == [{"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]}]
    pod = manifests["Deployment"]["spec"]["template"]
    assert pod["spec"]["automountServiceAccountToken"] is False
    holders = [
        n for n, c in containers(pod).items() for m in c.get("volumeMounts", []) if m["name"] == "stopline-token"
    ]
    assert holders == ["stopline"]


def test_a_namespace_given_to_all_reaches_the_account_that_is_bound(tmp_path: Path) -> None:
    write(tmp_path, "sidecar-kube-log", server("Deployment"), namespace="ml")
    manifests = {m["kind"]: m for m in parsed(kustomize(tmp_path))}
    assert manifests["RoleBinding"]["subjects"][0]["namespace"] == "ml"


@pytest.mark.parametrize("way", ["gpu-runtime", "gpu-dra"])
def test_gpus_are_shown_to_the_sidecar_without_taking_one(tmp_path: Path, way: str) -> None:
    write(tmp_path, "sidecar", server("Deployment"))
    text = (tmp_path / "kustomization.yaml").read_text()
    settings = yaml.safe_load(text)
    settings["components"].append(settings["components"][0].replace("sidecar", way))
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(settings))
    manifests = parsed(kustomize(tmp_path))
    check_schemas(manifests)
    (pod,) = pods(manifests)
    check_sidecar(pod, native=True)
    assert beyond_restricted(pod) == set()
    sidecar = containers(pod)["stopline"]
    assert {e["name"] for e in sidecar["env"]} >= {"STOPLINE_LOG"}
    if way == "gpu-dra":
        assert sidecar["resources"]["claims"] == [{"name": "gpu"}]


@pytest.mark.parametrize("way", ["tls", "gpu-runtime", "gpu-dra"])
@pytest.mark.parametrize(
    ("order", "problem"),
    [(("", "sidecar"), "nothing selected by PodTemplate"), (("sidecar-plain", ""), "unable to find field")],
)
def test_what_needs_the_native_sidecar_is_refused_before_it_and_beside_another(
    tmp_path: Path, way: str, order: tuple[str, str], problem: str
) -> None:
    components = [os.path.relpath(DEPLOY / "kustomize" / (name or way), tmp_path) for name in order]
    write(tmp_path, way, server("Deployment"), components=components)
    with pytest.raises(AssertionError, match=problem):
        kustomize(tmp_path)


def test_with_tls_the_probe_and_the_monitor_speak_it(tmp_path: Path) -> None:
    paths = {
        name: os.path.relpath(DEPLOY / "kustomize" / name, tmp_path.resolve())
        for name in ("sidecar", "tls", "podmonitor")
    }
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(server("StatefulSet")))
    settings = {"resources": ["server.yaml", paths["podmonitor"]], "components": [paths["sidecar"], paths["tls"]]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(settings))
    manifests = parsed(kustomize(tmp_path))
    check_schemas(manifests)
    (pod,) = pods(manifests)
    check_sidecar(pod, native=True)
    assert beyond_restricted(pod) == set()
    assert containers(pod)["stopline"]["livenessProbe"]["httpGet"] == {
        "path": "/-/healthy",
        "port": "stopline",
        "scheme": "HTTPS",
    }
    endpoints = [e for m in manifests if m["kind"] == "PodMonitor" for e in m["spec"]["podMetricsEndpoints"]]
    assert [(e["port"], e["scheme"]) for e in endpoints] == [("stopline", "https")] * 2
    assert all({"tlsConfig", "basicAuth"} <= set(e) for e in endpoints)


def test_the_network_policy_closes_our_port_and_no_other() -> None:
    (policy,) = parsed(kustomize(DEPLOY / "kustomize/networkpolicy"))
    check_schemas([policy])
    limited, free = policy["spec"]["ingress"]
    assert limited["ports"] == [{"port": config.DEFAULT_PORT}]
    tcp = [range(p["port"], p["endPort"] + 1) for p in free["ports"] if p.get("protocol") is None]
    assert "from" not in free
    assert {n for ports in tcp for n in ports} == set(range(1, 65536)) - {config.DEFAULT_PORT}


def test_settings_are_changed_by_a_patch_and_the_script_stays(tmp_path: Path) -> None:
    patch = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: stopline}\ndata: {stopline.yml: 'engine: {}'}\n"
    write(tmp_path, "sidecar", server("Deployment"), patches=[{"patch": patch}])
    (settings,) = (m for m in parsed(kustomize(tmp_path)) if m["kind"] == "ConfigMap")
    assert settings["data"]["stopline.yml"] == "engine: {}"
    assert settings["data"]["with-log"].startswith("#!/bin/sh")


def test_a_server_without_a_command_is_refused_instead_of_left_without_a_log(tmp_path: Path) -> None:
    manifest = server("Deployment")
    del manifest["spec"]["template"]["spec"]["containers"][0]["command"]
    write(tmp_path, "sidecar", manifest)
    result = subprocess.run([KUBECTL, "kustomize", tmp_path], capture_output=True, text=True, check=False)
    assert result.returncode
    assert re.search(r"doc is missing path: \S*/containers/0/command/0", result.stderr)


def test_an_example_is_rendered_as_it_was(example: tuple[str, str], golden) -> None:
    name, text = example
    golden(f"kustomize__{name}.yaml", text)


def test_an_example_is_sound(example: tuple[str, str], tmp_path: Path) -> None:
    manifests = parsed(example[1])
    check_schemas(manifests)
    assert unresolved(manifests) == set()
    for pod in pods(manifests):
        check_sidecar(pod, native=True)
        assert {f for f in beyond_restricted(pod) if "stopline" in f} == set()
    for manifest in manifests:
        for key, value in (manifest.get("data") or {}).items():
            if key.endswith(".yml"):
                path = tmp_path / key
                path.write_text(value)
                loaded = config.load(path)
                if key == "stopline.yml":
                    check_port(loaded.engine.url, next(pods(manifests)))
    monitors = [m["spec"] for m in manifests if m["kind"] == "PodMonitor"]
    assert {m["selector"]["matchLabels"]["stopline"] for m in monitors} == {"sidecar", "worker"}
    assert [e["port"] for m in monitors for e in m["podMetricsEndpoints"]] == ["stopline"] * 2


def check_port(url: str, pod: Manifest) -> None:
    engine = containers(pod)["server"]
    port = url.rpartition(":")[2]
    assert [str(p["containerPort"]) for p in engine["ports"]] == [port]
    assert re.search(rf"(^|=|\s){port}$", "\n".join(engine["args"]), re.MULTILINE)


def test_the_example_for_restricted_namespaces_is_taken_by_them() -> None:
    (pod,) = pods(parsed(kustomize(DEPLOY / "kustomize/examples/llamacpp")))
    assert beyond_restricted(pod) == set()


def test_a_restart_of_the_sidecar_alone_does_not_cost_the_group() -> None:
    """A LeaderWorkerSet counts the restarts of every container; only the leader has a page."""
    both = list(pods(parsed(kustomize(DEPLOY / "kustomize/examples/two-nodes"))))
    assert ["livenessProbe" in containers(pod)["stopline"] for pod in both] == [False, False]
    assert [pod["metadata"]["labels"]["stopline"] for pod in both] == ["sidecar", "worker"]
    assert [containers(pod)["stopline"]["args"][-1] for pod in both] == [
        "/etc/stopline/stopline.yml",
        "/etc/stopline/worker.yml",
    ]


def test_the_version_is_ours() -> None:
    for path in (DEPLOY / "kustomize").rglob("*.yaml"):
        assert set(re.findall(r"stopline:(\d[\w.]*)|newTag: (\S+)", path.read_text())) <= {
            (__version__, ""),
            ("", __version__),
        }, path


def test_the_rules_are_those_of_prometheus_and_dcgm_exporters_can_be_left_out(tmp_path: Path) -> None:
    """The patch is the one in the comment that says so."""
    directory = DEPLOY / "kustomize/rules"
    manifests = parsed(kustomize(directory))
    assert manifests == parsed((DEPLOY / "rules/kubernetes/prometheusrule.yaml").read_text())
    assert [m["metadata"]["name"] for m in manifests] == ["stopline", "stopline-dcgm"]
    text = (directory / "kustomization.yaml").read_text()
    patch = "\n".join(line[4:] for line in text.splitlines() if line.startswith("#   "))
    path = os.path.relpath(directory, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(f"resources: [{path}]\n{patch}\n")
    assert parsed(kustomize(tmp_path)) == manifests[:1]


def test_boards_are_config_maps_for_grafanas_sidecar() -> None:
    manifests = parsed(kustomize(DEPLOY / "kustomize/boards"))
    check_schemas(manifests)
    sources = {path.stem: path.read_text() for path in (DEPLOY.parent / "grafana/dashboards").glob("*.json")}
    assert {m["metadata"]["name"]: m["data"] for m in manifests} == {
        name: {f"{name}.json": text} for name, text in sources.items()
    }
    assert {m["kind"] for m in manifests} == {"ConfigMap"}
    assert {m["metadata"]["labels"]["grafana_dashboard"] for m in manifests} == {"1"}
