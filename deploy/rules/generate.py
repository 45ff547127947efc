#!/usr/bin/env python3
"""The rules in another form: as a PrometheusRule for an operator, or with all windows shortened, for a demo or a test.

    generate.py > prometheusrule.yaml                                  # what is committed in kubernetes/
    generate.py --runbooks https://wiki.example.org/stopline --grafana https://grafana.example.org > mine.yaml
    generate.py --form rules --shorten 30 > fast.yaml                  # five minutes become ten seconds

The YAML files beside this one are the source, and are what a Prometheus without an operator loads. With --shorten, run
Prometheus with --query.lookback-delta shortened alike (10s for 30), and scrape once a second.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
RUNBOOKS = "https://stopline.example.com/runbooks"
GRAFANA = "https://grafana.example.com"
_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_DURATION = r"(?:\d+(?:ms|[smhdw]))+"
_WINDOWS = re.compile(rf"(?<=\[){_DURATION}(?=[\]:])|(?<=\d[smhdw]:){_DURATION}(?=\])|(?<=offset ){_DURATION}")
_SECONDS = re.compile(r"(?<=time\(\) - )\d+")


def groups() -> list[dict[str, Any]]:
    """All groups of the source, file by file."""
    return [group for path in sorted(HERE.glob("*.yaml")) for group in yaml.safe_load(path.read_text())["groups"]]


def shortened(found: list[dict[str, Any]], factor: float) -> list[dict[str, Any]]:
    """*found* with every duration divided by *factor*: windows, offsets, intervals, and how long an alert waits."""

    def duration(text: str) -> str:
        total = sum(int(n) * _UNITS[unit] for n, unit in re.findall(r"(\d+)(ms|[smhdw])", text))
        return f"{max(1, round(total / factor))}ms"

    def expression(text: str) -> str:
        text = _WINDOWS.sub(lambda match: duration(match[0]), text)
        return _SECONDS.sub(lambda match: f"{float(match[0]) / factor:g}", text)

    def rule(given: dict[str, Any]) -> dict[str, Any]:
        changed = given | {"expr": expression(given["expr"])}
        changed |= {key: duration(given[key]) for key in ("for", "keep_firing_for") if key in given}
        if "annotations" in given:
            changed["annotations"] = {name: expression(text) for name, text in given["annotations"].items()}
        return changed

    return [
        group | {"interval": duration(group["interval"]), "rules": [rule(each) for each in group["rules"]]}
        for group in found
    ]


def linked(found: list[dict[str, Any]], runbooks: str, grafana: str) -> list[dict[str, Any]]:
    """*found* with the addresses of the runbooks and of Grafana in place of the examples."""

    def annotations(given: dict[str, str]) -> dict[str, str]:
        return {name: text.replace(RUNBOOKS, runbooks).replace(GRAFANA, grafana) for name, text in given.items()}

    return [
        group
        | {
            "rules": [
                each | {"annotations": annotations(each["annotations"])} if "annotations" in each else each
                for each in group["rules"]
            ]
        }
        for group in found
    ]


def manifests(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As prometheus-operator takes them; their own labels must be those that the Prometheus selects.

    What is read from dcgm-exporter is an object of its own, so that it can be left out.
    """
    parts: dict[str, list[dict[str, Any]]] = {"stopline": [], "stopline-dcgm": []}
    for group in found:
        parts["stopline-dcgm" if group["name"] == "stopline-dcgm" else "stopline"].append(group)
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "stopline"}},
            "spec": {"groups": part},
        }
        for name, part in parts.items()
    ]


def text(documents: list[dict[str, Any]]) -> str:
    """YAML in which an expression of several lines stays one."""
    head = "# Made by deploy/rules/generate.py; edit the rules there.\n"
    return head + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1_000_000, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    pass


def _string(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _string)


def main(arguments: list[str] | None = None, write: Callable[[str], object] = sys.stdout.write) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--form", choices=("prometheusrule", "rules"), default="prometheusrule")
    parser.add_argument("--shorten", type=float, default=1.0, metavar="FACTOR", help="divide every duration by this")
    parser.add_argument("--runbooks", default=RUNBOOKS, metavar="URL", help="where the runbooks are")
    parser.add_argument("--grafana", default=GRAFANA, metavar="URL", help="where Grafana is")
    given = parser.parse_args(arguments)
    found = linked(groups(), given.runbooks.rstrip("/"), given.grafana.rstrip("/"))
    if given.shorten != 1:
        found = shortened(found, given.shorten)
    write(text([{"groups": found}] if given.form == "rules" else manifests(found)))


if __name__ == "__main__":
    main()
