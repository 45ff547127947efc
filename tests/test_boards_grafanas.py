"""What Grafana's own types of its oldest and its newest release make of the boards: nothing asked or judged is lost.

The types are grafana-foundation-sdk's, whose package of 10.1 is the oldest there is; 0.0.21 is of Grafana 13.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from boards import GRAFANA, boards

CACHE = GRAFANA.parent / ".cache/grafana-types"
READ_AND_WRITE = """
import json, sys
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
register_default_plugins()
json.dump([Dashboard.from_json(board) for board in json.load(sys.stdin)], sys.stdout, cls=JSONEncoder)
"""
LOST = {
    "1769699998!10.1.0": {  # each by the kind of panel that it is of; came later, and Grafana 10 does without
        # its types have no key of a data source's own annotation, and none of a repeated panel's width; Grafana 10 does
        *(f"annotations.list.{key}" for key in ("builtIn", "step", "tagKeys", "textFormat", "titleFormat")),
        "timeseries.maxPerRow",
        "templating.list.allowCustomValue",
        *(f"stat.options.{key}" for key in ("wideLayout", "showPercentChange", "percentChangeColorMode")),
        *(f"bargauge.options.{key}" for key in ("namePlacement", "sizing", "legend", "maxVizHeight")),
        *(f"heatmap.options.{key}" for key in ("tooltip.mode", "selectionMode")),
        "state-timeline.options.perPage",
    },
    "0.0.21": set(),
}


def read_and_written(version: str) -> list[dict[str, Any]]:
    """The boards, through the types of *version*."""
    types = CACHE / version.replace("!", "-")
    if not types.exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--root-user-action=ignore"]
        subprocess.run([*install, "--target", types, f"grafana-foundation-sdk=={version}"], check=True)
    made = subprocess.run(
        [sys.executable, "-c", READ_AND_WRITE],
        input=json.dumps(list(boards().values())),
        env=os.environ | {"PYTHONPATH": str(types)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(made.stdout)


def differences(one: Any, other: Any, at: str = "") -> Iterator[str]:
    """Where *one* has what *other* has not; a panel's by its type."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key, value in one.items():
            within = f"{one['type'] if at == 'panels' else at}.{key}".lstrip(".")
            if key in other:
                yield from differences(value, other[key], within)
            else:
                yield within
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for mine, theirs in zip(one, other, strict=True):
            yield from differences(mine, theirs, at)
    elif one != other:
        yield at


@pytest.mark.parametrize("version", LOST)
def test_this_grafana_loses_nothing_but(version: str) -> None:
    found = {
        where for pair in zip(boards().values(), read_and_written(version), strict=True) for where in differences(*pair)
    }
    assert found == LOST[version]
