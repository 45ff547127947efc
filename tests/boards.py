"""The committed boards, read for tests and for the preview: panels, queries, and what Grafana fills in."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rules import named

GRAFANA = Path(__file__).parent.parent / "grafana"
ALL: Mapping[str, str] = {}


@dataclass(frozen=True)
class Target:
    """One query of one panel."""

    board: str
    panel: str
    ref: str
    expression: str
    legend: str
    instant: bool

    def __str__(self) -> str:
        return f"{self.board.removeprefix('stopline-')} / {self.panel} / {self.legend if self.legend != '__auto' else self.ref}"


@cache
def boards() -> dict[str, dict[str, Any]]:
    """Each by its uid."""
    files = sorted((GRAFANA / "dashboards").glob("*.json"))
    return {board["uid"]: board for board in map(json.loads, (file.read_text() for file in files))}


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All but rows."""
    for panel in board["panels"]:
        if panel["type"] != "row":
            yield panel
        yield from panel.get("panels", [])


def targets() -> list[Target]:
    return [
        Target(uid, panel["title"], t["refId"], t["expr"], t.get("legendFormat", ""), bool(t.get("instant")))
        for uid, board in boards().items()
        for panel in panels(board)
        for t in panel.get("targets", [])
    ]


def expressions() -> dict[str, str]:
    """Every PromQL of the boards by where it stands: queries of panels, of variables, of annotations."""
    found = {f"{target} {target.ref}": target.expression for target in targets()}
    for uid, board in boards().items():
        for annotation in board["annotations"]["list"]:
            found[f"{uid} annotation {annotation['name']}"] = annotation["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                inner = re.fullmatch(r"(?:query_result|label_values)\((.+?)(?:, (\w+))?\)", variable["query"]["query"])
                assert inner, variable
                found[f"{uid} variable {variable['name']}"] = inner[1]
    return found


def names() -> set[str]:
    """Of the metrics that the boards ask for."""
    text = " ".join(expressions().values())
    return named(text) | set(re.findall(r"\b(?:process_\w+|ALERTS)\b", text))


def sampled() -> set[str]:
    """Those of them that a sidecar exports; a classic histogram's as its samples are named."""
    return {name for name in names() if not name.startswith(("stopline:", "ALERTS"))}


def filled(expression: str, *, chosen: Mapping[str, str] = ALL, rate: str = "1m", shown: str = "1h") -> str:
    """As Grafana sends it: *chosen* maps variables to regular expressions, all others are All; durations are PromQL's."""
    expression = expression.replace("$__rate_interval", rate).replace("$__range", shown)
    return re.sub(r"\$([a-z]\w*)", lambda match: chosen.get(match[1], ".*"), expression)
