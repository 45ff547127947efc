"""The boards are what their source says, fit Grafana's own types, and follow the rules of its dashboard-linter.

Source of the rules: github.com/grafana/dashboard-linter, docs/rules. Left out, each with its reason:

- template-job, target-job, target-instance in part: the variable `job` and a matcher for it. All our names begin with
  stopline, so a job picks nothing that they do not; `namespace`, `pod` and `instance` are matched in its place.
- target-logql and target-logql-auto: there is no Loki here.
- target-rate-interval for `[5m]`: what stands beside a recorded quantile, or repeats an alert's expression, has the
  window of the rules, for it would contradict them otherwise.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from boards import GRAFANA, boards, expressions, filled, names, panels, targets
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from rules import ELSEWHERE, exported, promtool, recorded, rules

from exporter import catalog

UIDS = ("stopline-lines", "stopline-headroom", "stopline-why", "stopline-capacity")
SELECTORS = ('namespace=~"$namespace"', 'pod=~"$pod"', 'instance=~"$instance"')
ANNOTATION_KEYS = {"titleFormat", "textFormat", "tagKeys", "step"}
COUNTERS = {f.name for f in catalog.FAMILIES if f.kind == "counter"} | {
    f.name + suffix for f in catalog.FAMILIES if f.kind == "histogram" for suffix in ("_bucket", "_sum", "_count")
}
each_board = pytest.mark.parametrize("uid", UIDS)


def test_what_is_committed_is_what_the_source_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, GRAFANA / "generate.py", "--to", tmp_path], check=True)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    root = GRAFANA.parent
    assert {path: (root / path).read_text() for path in made} == made, "run make boards, or grafana/generate.py"
    assert {path.stem for path in (GRAFANA / "dashboards").glob("*.json")} == set(UIDS)


@each_board
def test_a_board_passes_through_grafanas_types(uid: str) -> None:
    """But for the keys of a Prometheus annotation, which these types do not have."""
    register_default_plugins()
    board = boards()[uid]
    again = json.loads(json.dumps(Dashboard.from_json(json.loads(json.dumps(board))), cls=JSONEncoder))
    for annotation in board["annotations"]["list"]:
        assert set(annotation) >= ANNOTATION_KEYS
    assert again == board | {
        "annotations": {"list": [_without(a, ANNOTATION_KEYS) for a in board["annotations"]["list"]]}
    }


def _without(found: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in keys}


@each_board
def test_a_board_is_one_that_any_grafana_from_10_on_loads(uid: str) -> None:
    """Source of what newer ones change on loading: github.com/grafana/grafana, apps/dashboard/pkg/migration/schemaversion.

    Grafana 13 takes versions from 13 on and brings them to 42: to 40 `refresh` is made a text, to 41 the times of the
    picker go, to 42 what is hidden is hidden from tooltips too. Its tables read `overrides` without asking for them, and
    rename `custom.hidden` by themselves.
    """
    board = boards()[uid]
    assert board["schemaVersion"] == 39  # of Grafana 10
    assert isinstance(board["refresh"], str)
    assert "timepicker" not in board
    for panel in panels(board):
        if panel["type"] != "text":
            assert isinstance(panel["fieldConfig"]["overrides"], list), panel["title"]
        assert {step["id"] for step in panel.get("transformations", [])} <= {
            "merge", "filterFieldsByName", "organize", "convertFieldType", "sortBy", "groupingToMatrix",
        }, panel["title"]  # fmt: skip
    assert "apiVersion" not in board
    assert "elements" not in board  # of schema version 2
    assert {p["type"] for p in panels(board)} <= {
        "stat", "timeseries", "table", "state-timeline", "heatmap", "bargauge", "barchart", "text",
    }  # fmt: skip


# the linter's rules


@each_board
def test_there_is_one_datasource_and_it_is_a_variable(uid: str) -> None:
    """template-datasource, panel-datasource; and no other is named anywhere."""
    board = boards()[uid]
    (datasource,) = (v for v in board["templating"]["list"] if v["type"] == "datasource")
    assert (datasource["name"], datasource["query"], datasource["label"]) == ("datasource", "prometheus", "Data source")
    for panel in panels(board):
        if panel["type"] != "text":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
    assert set(re.findall(r'"uid": "([^"]*)"', json.dumps(board))) == {"${datasource}", uid}


@each_board
def test_variables_follow_the_time_and_their_all_takes_labels_that_are_absent(uid: str) -> None:
    """template-on-time-change-reload, template-label-promql, template-instance."""
    variables = {v["name"]: v for v in boards()[uid]["templating"]["list"]}
    assert {"datasource", "namespace", "model", "pod", "instance"} <= set(variables)
    for name, variable in variables.items():
        if variable["type"] == "query":
            assert (variable["refresh"], variable["includeAll"], variable["allValue"]) == (2, True, ".*"), name
            assert variable["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, name


@each_board
def test_every_panel_is_named_explained_measured_and_never_calm_without_data(uid: str) -> None:
    """panel-title-description, panel-units, panel-no-targets; and what stands where nothing is known."""
    for panel in panels(boards()[uid]):
        title = panel["title"]
        assert title, panel["id"]
        assert len(panel["description"]) > 20, title
        if panel["type"] == "text":
            continue
        assert panel["targets"], title
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"], title
        assert re.match(r"(cannot be judged: |none is told)", defaults["noValue"]), title


@each_board
def test_no_number_in_a_table_is_missing_with_a_text_that_its_cell_cuts(uid: str) -> None:
    """What stands for a whole panel without data is too long for a cell: each column has its own, or words for null."""
    for panel in panels(boards()[uid]):
        if panel["type"] != "table" or len(panel["targets"]) == 1:
            continue
        (names,) = (t["options"]["renameByName"] for t in panel["transformations"] if t["id"] == "organize")
        told = {o["matcher"]["options"]: {p["id"] for p in o["properties"]} for o in panel["fieldConfig"]["overrides"]}
        numbers = [name for column, name in names.items() if column.startswith("Value #")]
        cut = [name for name in numbers if not {"noValue", "mappings"} & told.get(name, set())]
        assert cut == [], panel["title"]


@each_board
def test_panels_lie_beside_each_other(uid: str) -> None:
    """Each within the 24 columns, and no two on the same place."""
    taken: Counter[tuple[int, int]] = Counter()
    for panel in boards()[uid]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken.update((place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"]))
    assert [cell for cell, times in taken.items() if times > 1] == []
    ids = [panel["id"] for panel in boards()[uid]["panels"]]
    assert len(set(ids)) == len(ids)


@each_board
def test_boards_lead_to_each_other_with_what_is_chosen_and_when(uid: str) -> None:
    links = boards()[uid]["links"]
    assert [link["url"] for link in links] == [f"/d/{other}" for other in UIDS if other != uid]
    assert all(link["includeVars"] and link["keepTime"] for link in links)


@each_board
def test_alerts_are_marked_on_every_time_series(uid: str) -> None:
    (annotation,) = boards()[uid]["annotations"]["list"]
    assert annotation["enable"] is True
    assert annotation["expr"].startswith('(ALERTS{alertname=~"Stopline.+", alertstate=~"firing"')
    assert "filter" not in annotation  # of panels: all


def test_no_board_can_be_edited_where_it_is_shown() -> None:
    """uneditable-dashboard: a change belongs in the source."""
    assert {board["editable"] for board in boards().values()} == {False}


def test_every_query_is_valid(tmp_path: Path) -> None:
    """target-promql."""
    found = {"groups": [{"name": "boards", "rules": [
        {"record": f"board:query:{n}", "expr": filled(text)} for n, text in enumerate(expressions().values())
    ]}]}  # fmt: skip
    file = tmp_path / "boards.yaml"
    file.write_text(yaml.safe_dump(found))
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_query_is_of_what_is_selected() -> None:
    """target-instance: all three labels that tell replicas apart; else the model and configuration of a capacity curve."""
    for where, text in expressions().items():
        if " variable " in where:
            continue
        whole = all(label in text for label in SELECTORS)
        assert whole or ('model=~"$model"' in text and 'config=~"$config"' in text), where


def test_counters_are_only_read_as_rates_over_the_interval_of_scrapes() -> None:
    """target-counter-agg, target-rate-interval."""
    for where, text in expressions().items():
        for name in COUNTERS:
            for match in re.finditer(rf"\b{name}\b({{[^}}]*}})?(\[[^\]]*\])?", text):
                before = text[: match.start()]
                assert re.search(r"\b(rate|increase)\($", before), (where, name)
                assert match[2] in ("[$__rate_interval]", "[5m]"), (where, name)


def test_no_query_matches_the_bound_of_a_bucket() -> None:
    """It is le="1" in Prometheus 2 and le="1.0" in Prometheus 3."""
    assert [where for where, text in expressions().items() if re.search(r"\ble\s*(=|!)", text)] == []


def test_every_metric_that_is_asked_for_exists() -> None:
    processes = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
    assert names() - exported() - recorded() - ELSEWHERE - processes == set()


def test_what_is_recorded_for_boards_is_on_one() -> None:
    used = names()
    for rule in rules():
        used |= set(re.findall(r"stopline:[\w:]+", str(rule["expr"]) + str(rule.get("annotations"))))
    assert recorded() - used == set()


def test_every_reason_that_the_rules_tell_has_its_words() -> None:
    """A reason without them would stand there as the number 1."""
    told = {
        label: {rule["labels"][label] for rule in rules() if rule.get("record") == record}
        for label, record in (("cause", "stopline:latency_cause:score"), ("reason", "stopline:memory:over_line"))
    } | {"kind": set(catalog.ERROR_KINDS)}
    spoken: dict[str, set[str]] = {label: set() for label in told}
    for panel in panels(boards()["stopline-lines"]):
        for target in panel.get("targets", []):
            if found := re.fullmatch(r"\{\{(\w+)\}\} · replicas: \{\{replicas\}\}", target["legendFormat"]):
                words = (each["matcher"]["options"] for each in panel["fieldConfig"]["overrides"])
                spoken[found[1]] = {word.removeprefix("/^").removesuffix(" /") for word in words}
    assert {label: words - spoken[label] for label, words in told.items()} == {label: set() for label in told}
    assert all(told.values())


def test_what_the_alerts_lead_to_is_a_board() -> None:
    links = {rule["annotations"]["dashboard_url"] for rule in rules() if "alert" in rule}
    (link,) = links
    assert link.partition("?")[0].rpartition("/")[2] == UIDS[0]
    variables = {v["name"] for v in boards()[UIDS[0]]["templating"]["list"]}
    assert set(re.findall(r"var-(\w+)=", link)) <= variables


def test_what_is_provisioned_is_where_compose_mounts_it() -> None:
    services = yaml.safe_load((GRAFANA.parent / "deploy/compose/compose.yaml").read_text())["services"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/stopline.yaml").read_text())["providers"]
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert mounts["../../grafana/dashboards"] == provider["options"]["path"]
    assert mounts["../../grafana/provisioning"] == "/etc/grafana/provisioning"
    assert source["type"] == "prometheus"
    assert re.fullmatch(r"http://(\w+):9090", source["url"])[1] in services  # type: ignore[index]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{UIDS[0]}.json"


def test_no_two_queries_of_a_panel_are_the_same() -> None:
    found = Counter((t.board, t.panel, t.expression) for t in targets())
    assert [key for key, times in found.items() if times > 1] == []
