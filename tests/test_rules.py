"""The rules are valid, fire when they must and at no other time, and name nothing that does not exist."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from rules import (
    ELSEWHERE,
    FILES,
    RULES,
    RUNBOOKS,
    alerts,
    amtool,
    exported,
    generate,
    named,
    promtool,
    queries,
    recorded,
    rules,
)

from exporter import catalog
from exporter.config import Thresholds
from exporter.doctor import services

TESTS = sorted((RULES / "tests").glob("*_test.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rules_are_valid(path: Path) -> None:
    checked = promtool("check", "rules", path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_rules_fire_when_they_must_and_at_no_other_time(path: Path) -> None:
    tested = promtool("test", "rules", path)
    assert tested.returncode == 0, tested.stdout + tested.stderr


# every alert is whole


def test_every_alert_says_how_bad_it_is_and_where_to_look() -> None:
    for alert in alerts():
        name, annotations = alert["alert"], alert["annotations"]
        assert alert["labels"]["severity"] in ("critical", "warning"), name
        assert set(annotations) == {"summary", "description", "runbook_url", "dashboard_url"}, name
        assert "{{" not in annotations["summary"], f"{name}: the summary is fixed"
        assert annotations["runbook_url"].endswith(f"/{name}.md")
        assert "keep_firing_for" in alert, name
        critical = name in ("StoplineEngineFailed", "StoplineErrorsAppeared")
        assert critical or "for" in alert, f"{name} fires at the first evaluation"


def test_the_alerts_are_those_that_the_doctor_looks_for() -> None:
    assert {alert["alert"] for alert in alerts()} == set(services._ALERTS)
    assert services._BASELINE in recorded()


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    pages = {path.stem: path.read_text() for path in RUNBOOKS.glob("*.md")}
    assert set(pages) == {alert["alert"] for alert in alerts()}
    for name, page in pages.items():
        assert page.startswith(f"# {name}\n")
        assert re.findall(r"(?m)^## (.*)", page) == ["Meaning", "Impact", "Diagnosis", "Mitigation"], name
        assert queries(page), f"{name}: nothing to paste"
        severity = next(alert["labels"]["severity"] for alert in alerts() if alert["alert"] == name)
        assert f"Severity: {severity}." in page


def test_every_alert_is_seen_firing_and_silent() -> None:
    """Where it is expected at all, the pods beside it show that it does not fire there."""
    expected = "".join(path.read_text() for path in TESTS)
    missing = {a["alert"] for a in alerts() if f'alertname="{a["alert"]}"' not in expected}
    assert missing == set()


def test_queries_of_runbooks_are_valid(tmp_path: Path) -> None:
    found = [query for path in sorted(RUNBOOKS.glob("*.md")) for query in queries(path.read_text())]
    file = tmp_path / "runbooks.yaml"
    named_rules = [{"record": f"runbook:query:{n}", "expr": query} for n, query in enumerate(found)]
    file.write_text(yaml.safe_dump({"groups": [{"name": "runbooks", "rules": named_rules}]}))
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_nothing_is_left_unresolved_in_what_an_alert_says() -> None:
    """As Prometheus itself writes it out, for each alert at least once."""
    said = {
        (case["alertname"], text)
        for path in TESTS
        for test in yaml.safe_load(path.read_text())["tests"]
        for case in test.get("alert_rule_test", [])
        for alert in case["exp_alerts"]
        for text in alert["exp_annotations"].values()
    }
    assert {name for name, _ in said} == {alert["alert"] for alert in alerts()}
    assert {
        (name, text) for name, text in said if re.search(r"\{\{|\}\}|<no value>|<nil>|%!|<error|NaN|Inf", text)
    } == set()


# what is named exists


def test_every_metric_named_exists() -> None:
    known = exported() | recorded() | ELSEWHERE | {family.name for family in catalog.FAMILIES}
    texts = {f"{rule.get('record') or rule['alert']}": str(rule) for rule in rules()}
    texts |= {path.name: "\n".join(queries(path.read_text())) for path in RUNBOOKS.glob("*.md")}
    unknown = {where: names for where, text in texts.items() if (names := named(text) - known)}
    assert unknown == {}


def test_prose_of_runbooks_names_what_exists() -> None:
    families = {family.name for family in catalog.FAMILIES}
    for path in RUNBOOKS.glob("*.md"):
        assert named(path.read_text()) - families - exported() - recorded() == set(), path.name
        links = re.findall(r"\]\((\w+\.md)\)", path.read_text())
        assert all((RUNBOOKS / link).is_file() for link in links), path.name


def test_every_recorded_name_is_used_or_for_people() -> None:
    used = set()
    for rule in rules():
        used |= named(str(rule)) - {rule.get("record")}
    assert recorded() - used == PEOPLE


PEOPLE = {
    "stopline:concurrency_limit",
    "stopline:config:layout",
    "stopline:line:state",
    "stopline:replica:model",
    "stopline:request_latency_seconds:baseline_since_timestamp_seconds",
    "stopline:request_latency_seconds:baseline_source",
    "stopline:request_time_to_first_token_seconds:p99_5m",
    "stopline:request_time_to_first_token_seconds:p99_baseline",
}
"""Recorded for boards, runbooks and gates; no rule builds on them."""


def test_every_threshold_is_compared_with_and_its_absence_told() -> None:
    known = {field.name for field in fields(Thresholds)}
    text = "".join(rule["expr"] for rule in rules())
    compared = set(re.findall(r'stopline:threshold:latest\{line="(\w+)"\}', text))
    twin = re.search(r'stopline:threshold:latest\{line=~"([\w|]+)"\}\s*\) < (\d+)', text)
    assert twin is not None
    assert compared == known == set(twin[1].split("|"))
    assert int(twin[2]) == len(known)


def test_two_replicas_never_meet_in_a_join() -> None:
    """A second series on the one side of a join ends the rule for every replica, so that side is aggregated."""
    for rule in rules():
        for match in re.finditer(
            r"(?:or|and|unless|[-+*/<>]=?|==) on \([\w, ]*\) group_left \([\w, ]*\)\s*(\S+)", rule["expr"]
        ):
            assert match[1].startswith(("stopline:", "max", "topk", "sum", "0.5")), match[0]


# other forms


def test_the_manifest_is_that_of_the_rules() -> None:
    assert generate() == (RULES / "kubernetes/prometheusrule.yaml").read_text(), (
        "run deploy/rules/generate.py > deploy/rules/kubernetes/prometheusrule.yaml"
    )


def test_shortened_rules_are_valid_and_no_window_is_left_long(tmp_path: Path) -> None:
    file = tmp_path / "fast.yaml"
    file.write_text(generate("--form", "rules", "--shorten", "30"))
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(rules())} rules found" in checked.stdout
    durations = re.findall(r"[\[:](\d+\w+)[\]:]|(?:offset|interval:|for:) (\d+\w+)", file.read_text())
    assert durations
    assert {unit for pair in durations for text in pair if text for unit in re.findall(r"[a-z]+", text)} == {"ms"}


def test_links_are_replaced() -> None:
    made = generate("--runbooks", "https://wiki.test/stopline/", "--grafana", "https://grafana.test")
    assert "example.com" not in made
    assert "https://wiki.test/stopline/StoplineLatencyDoubled.md" in made


# Alertmanager


ALERTMANAGER = RULES.parent / "alertmanager/alertmanager.yml"


def test_the_alertmanager_example_is_valid_and_wakes_for_critical_alerts_only() -> None:
    assert amtool("check-config", ALERTMANAGER).returncode == 0
    for alert in alerts():
        severity = alert["labels"]["severity"]
        labels = (f"alertname={alert['alert']}", f"severity={severity}", "model=m")
        routed = amtool("config", "routes", "test", f"--config.file={ALERTMANAGER}", *labels).stdout.strip()
        assert routed == ("page,chat" if severity == "critical" else "chat"), alert["alert"]


def test_inhibitions_name_alerts_that_exist() -> None:
    known = {alert["alert"] for alert in alerts()}
    named_there = set(re.findall(r"Stopline[A-Z]\w+", ALERTMANAGER.read_text()))
    assert named_there <= known
