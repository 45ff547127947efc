"""The chart, rendered: rules as they are written, labels everywhere, and the sidecar of deploy/kustomize once more."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from helmcli import binary
from manifests import (
    DEPLOY,
    ROOT,
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

CHART = DEPLOY / "helm/stopline"
RULES = DEPLOY / "rules"
BOARDS = ROOT / "grafana/dashboards"
SAMPLE = """\
groups:
  - name: sample
    interval: 30s
    rules:
      - record: stopline:sample:ratio
        expr: vector(1)
      - alert: StoplineSample
        expr: stopline:sample:ratio > 0
        for: 5m
        keep_firing_for: 2m
        labels: {severity: critical}
        annotations:
          summary: A sample.
          description: '{{ with $labels.pod }}{{ . }}{{ end }} has {{ $value | humanize }} and {{ "{{" }}.'
          runbook_url: https://example.com/StoplineSample.md
      - alert: StoplineOther
        expr: vector(1)
"""


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart with one more file of rules."""
    path = tmp_path_factory.mktemp("chart") / "stopline"
    shutil.copytree(CHART, path)
    (path / "files/rules").mkdir(exist_ok=True)
    (path / "files/rules/sample.yaml").write_text(SAMPLE)
    return path


def helm(*arguments: str | Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
    result = subprocess.run([binary(), *arguments], capture_output=True, text=True, check=False)
    assert not ok or result.returncode == 0, result.stderr
    return result


def template(chart: Path, tmp_path: Path, **values: object) -> list[Manifest]:
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    return parsed(helm("template", "kps", chart, "--values", path, "--kube-version", "1.29.0").stdout)


def of(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """Those of this kind, but boards."""
    return [m for m in manifests if m["kind"] == kind and m not in boards(manifests)]


def boards(manifests: list[Manifest]) -> list[Manifest]:
    return [m for m in manifests if "-board-" in m["metadata"]["name"]]


def test_the_chart_is_sound(chart: Path) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", chart).stdout
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == __version__
    assert yaml.safe_load((CHART / "values.yaml").read_text())["sidecar"]["image"] == f"stopline:{__version__}"


def test_what_is_copied_into_the_chart_is_as_its_source() -> None:
    remedy = "run deploy/helm/copy-files"
    assert (CHART / "files/with-log").read_text() == (DEPLOY / "kustomize/parts/with-log").read_text(), remedy
    made = {p.name: p.read_text() for p in BOARDS.glob("*.json")}
    assert {p.name: p.read_text() for p in (CHART / "files/boards").glob("*.json")} == made, remedy
    sources = {p.name: p.read_text() for p in RULES.glob("*.yaml")}
    assert {p.name: p.read_text() for p in (CHART / "files/rules").glob("*.yaml")} == sources, remedy


def test_rules_come_out_as_they_went_in_and_prometheus_takes_them(chart: Path, tmp_path: Path) -> None:
    rendered = of(template(chart, tmp_path), "PrometheusRule")
    files = {p.stem: yaml.safe_load(p.read_text()) for p in (chart / "files/rules").glob("*.yaml")}
    assert {m["metadata"]["name"]: m["spec"] for m in rendered} == {
        f"kps-stopline-{name}": content for name, content in files.items()
    }
    check_schemas(rendered)
    for manifest in rendered:
        check_rules(manifest, tmp_path)


def test_alerts_are_left_out_labelled_and_linked_as_wanted(chart: Path, tmp_path: Path) -> None:
    rules = {"disabled": ["StoplineOther"], "labels": {"team": "ml"}, "runbooks": "https://wiki.example.com/"}
    (sample,) = (
        m
        for m in of(template(chart, tmp_path, rules=rules), "PrometheusRule")
        if m["metadata"]["name"].endswith("sample")
    )
    ((record, alert),) = (group["rules"] for group in sample["spec"]["groups"])
    assert set(record) == {"record", "expr"}
    assert alert["labels"] == {"severity": "critical", "team": "ml"}
    assert alert["annotations"]["runbook_url"] == "https://wiki.example.com/StoplineSample.md"
    assert "{{ $value | humanize }}" in alert["annotations"]["description"]


def check_rules(manifest: Manifest, tmp_path: Path) -> None:
    """Prometheus takes them."""
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(manifest["spec"]))
    result = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_with_everything_on_every_object_is_sound(chart: Path, tmp_path: Path) -> None:
    manifests = template(
        chart,
        tmp_path,
        extraLabels={"release": "kps"},
        rules={"labels": {"team": "ml"}, "runbooks": "https://wiki.example.com"},
        boards={"annotations": {"grafana_folder": "LLM"}},
        podMonitor={"enabled": False},
        serviceMonitor={"enabled": True},
        tls={"enabled": True},
    )
    check_schemas(manifests)
    assert unresolved(manifests) == set()
    assert {m["kind"] for m in manifests} == {"ConfigMap", "PrometheusRule", "Service", "ServiceMonitor"}
    for manifest in of(manifests, "PrometheusRule"):
        check_rules(manifest, tmp_path)


def test_what_is_read_from_dcgm_exporter_is_left_out_as_wanted(chart: Path, tmp_path: Path) -> None:
    names = [
        {m["metadata"]["name"] for m in of(template(chart, tmp_path, rules={"dcgm": on}), "PrometheusRule")}
        for on in (True, False)
    ]
    assert names[0] - names[1] == {"kps-stopline-dcgm"}


def test_boards_come_out_as_they_went_in_and_fit_a_config_map(chart: Path, tmp_path: Path) -> None:
    """`{{pod}}` in a legend is Grafana's; a ConfigMap holds 1 MiB."""
    rendered = boards(template(chart, tmp_path, boards={"annotations": {"grafana_folder": "LLM"}}))
    check_schemas(rendered)
    sources = {p.name: p.read_text() for p in BOARDS.glob("*.json")}
    assert len(sources) == 4
    assert {name: text for m in rendered for name, text in m["data"].items()} == sources
    assert "{{replica}}" in sources["stopline-lines.json"]
    assert max(len(text.encode()) for text in sources.values()) < 1 << 20
    for manifest in rendered:
        assert manifest["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert manifest["metadata"]["annotations"] == {"grafana_folder": "LLM"}
    assert boards(template(chart, tmp_path, boards={"enabled": False})) == []


def test_extra_labels_are_on_every_object(chart: Path, tmp_path: Path) -> None:
    manifests = template(chart, tmp_path, extraLabels={"release": "kps"})
    assert {m["kind"] for m in manifests} == {"ConfigMap", "PodMonitor", "PrometheusRule"}
    assert {m["metadata"]["labels"]["release"] for m in manifests} == {"kps"}
    assert unresolved(manifests) == set()


def test_the_settings_are_stoplines_as_values_and_as_text(chart: Path, tmp_path: Path) -> None:
    wanted = {"engine": {"url": "http://127.0.0.1:30000"}, "thresholds": {"memory_headroom_bytes": "2GiB"}}
    for settings in (wanted, yaml.safe_dump(wanted)):
        (manifest,) = of(template(chart, tmp_path, settings=settings), "ConfigMap")
        path = tmp_path / "stopline.yml"
        path.write_text(manifest["data"]["stopline.yml"])
        assert config.load(path).thresholds.memory_headroom_bytes == 2 << 30
        assert manifest["data"]["with-log"].rstrip() == (CHART / "files/with-log").read_text().rstrip()


def test_a_service_monitor_in_place_of_the_pod_monitor(chart: Path, tmp_path: Path) -> None:
    manifests = template(chart, tmp_path, podMonitor={"enabled": False}, serviceMonitor={"enabled": True})
    check_schemas(manifests)
    (service,), (monitor,) = of(manifests, "Service"), of(manifests, "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert not of(manifests, "PodMonitor")
    both = helm("template", chart, "--set", "serviceMonitor.enabled=true", ok=False)
    assert "scraped twice" in both.stderr


@pytest.mark.parametrize(
    "values",
    [
        "rule.enabled=true",
        "rules.disabled={NoSuch}",
        "podMonitor.interval=often",
        "sidecar.image=",
        "rules.runbooks=wiki",
        "boards.labels.grafana_dashboard=1",
        "extraLabels.release=1",
        "extraLabels.app\\.kubernetes\\.io/name=x",
        "rules.labels.severity=info",
        "podMonitor.interval=10m",
        "podMonitor.interval=0s",
        "podMonitor.namespaces={ML}",
        "settings=null",
        "rules=null",
    ],
)
def test_values_that_mean_nothing_are_refused(chart: Path, values: str) -> None:
    assert (
        "values don't meet the specifications of the schema"
        in helm("template", chart, "--set", values, ok=False).stderr
    )


def test_an_alert_that_there_is_not_cannot_be_left_out(chart: Path) -> None:
    told = helm("template", chart, "--set", "rules.disabled={StoplineKVCachePressure}", ok=False).stderr
    assert "there is no alert StoplineKVCachePressure; there are" in told
    assert "StoplineKvCachePressure" in told


def test_servers_in_other_namespaces_are_found_where_they_are_named(chart: Path, tmp_path: Path) -> None:
    (monitor,) = of(template(chart, tmp_path, podMonitor={"namespaces": ["ml", "chat"]}), "PodMonitor")
    check_schemas([monitor])
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["ml", "chat"]}
    (usual,) = of(template(chart, tmp_path, enabled=True), "PodMonitor")
    assert "namespaceSelector" not in usual["spec"]


MINE = """\
apiVersion: apps/v1
kind: Deployment
metadata:
  name: mine
spec:
  selector:
    matchLabels: {app: mine}
  template:
    metadata:
      labels:
        app: mine
        {{- include "stopline.podLabels" . | nindent 8 }}
    spec:
      PLACE:
        {{- include "stopline.sidecar" . | nindent 8 }}
      MORE
        - name: server
          image: engine:1
          command: [/bin/sh, /etc/stopline/with-log, /var/log/engine/server.log, serve, model]
          volumeMounts:
            {{- include "stopline.serverMounts" . | nindent 12 }}
      volumes:
        {{- include "stopline.volumes" . | nindent 8 }}
"""


@pytest.mark.parametrize(
    ("native", "variant", "tls"), [(True, "sidecar", False), (True, "sidecar", True), (False, "sidecar-plain", False)]
)
def test_the_sidecar_in_a_chart_of_ones_own_is_that_of_kustomize(
    chart: Path, tmp_path: Path, native: bool, variant: str, tls: bool
) -> None:
    from test_kustomize import server, write

    mine = tmp_path / "mine"
    (mine / "templates").mkdir(parents=True)
    shutil.copytree(chart, mine / "charts/stopline")
    (mine / "Chart.yaml").write_text("apiVersion: v2\nname: mine\nversion: 1.0.0\n")
    (mine / "values.yaml").write_text(
        json.dumps({"stopline": {"sidecar": {"native": native}, "tls": {"enabled": tls}}})
    )
    text = MINE.replace("PLACE", "initContainers").replace("MORE", "containers:")
    if not native:
        text = MINE.replace("PLACE", "containers").replace("      MORE\n", "")
    (mine / "templates/deployment.yaml").write_text(text)
    manifests = parsed(helm("template", "kps", mine).stdout)
    old = helm("template", "kps", mine, "--kube-version", "1.28.0", ok=False)
    assert (old.returncode != 0, "sidecar.native takes Kubernetes 1.29" in old.stderr) == (native, native)
    check_schemas(of(manifests, "Deployment"))
    (pod,) = pods(manifests)
    (tmp_path / "k").mkdir()
    parts = [os.path.relpath(DEPLOY / "kustomize" / part, tmp_path / "k") for part in (variant, "tls", "podmonitor")]
    components, resources = parts[: 1 + tls], ["server.yaml", parts[2]]
    write(tmp_path / "k", variant, server("Deployment"), components=components, resources=resources)
    theirs = parsed(kustomize(tmp_path / "k"))
    (wanted,) = pods(theirs)
    (monitor,) = of(manifests, "PodMonitor")
    assert monitor["spec"] in [m["spec"] for m in of(theirs, "PodMonitor")]
    assert by_name(containers(pod)["stopline"]) == by_name(containers(wanted)["stopline"])
    assert {f for f in beyond_restricted(pod) if "stopline" in f} == set()
    (settings,) = of(manifests, "ConfigMap")
    renamed = [
        v | ({"configMap": {"name": settings["metadata"]["name"]}} if "configMap" in v else {})
        for v in wanted["spec"]["volumes"]
    ]
    assert by_name({"volumes": pod["spec"]["volumes"]}) == by_name({"volumes": renamed})


def by_name(of: dict) -> dict:
    """With the order of lists of named things, which means nothing, alike."""
    lists = {k: v for k, v in of.items() if isinstance(v, list) and all(isinstance(one, dict) for one in v)}
    return of | {k: sorted(v, key=lambda one: one["name"]) for k, v in lists.items()}


def test_the_packed_chart_holds_what_it_needs(tmp_path: Path) -> None:
    helm("package", CHART, "--destination", tmp_path)
    listed = subprocess.run(["tar", "tzf", *tmp_path.glob("*.tgz")], capture_output=True, text=True, check=True).stdout
    assert {"stopline/files/with-log", "stopline/values.schema.json"} <= set(listed.split())
    assert str(ROOT) not in listed
