"""The shipped rules, read for tests: every rule, every expression, every name in them."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from exporter import catalog

RULES = Path(__file__).parent.parent / "deploy/rules"
RUNBOOKS = RULES.parent / "runbooks"
FILES = sorted(RULES.glob("*.yaml"))
_SUFFIXES = ("_bucket", "_sum", "_count")
ELSEWHERE = {"up", "ALERTS", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_USED"}
"""Metrics that are not ours: Prometheus' own, and dcgm-exporter's."""


@cache
def rules() -> tuple[dict[str, Any], ...]:
    return tuple(
        rule for path in FILES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]
    )


def alerts() -> list[dict[str, Any]]:
    """As they stand; some have two rules under one name."""
    return [rule for rule in rules() if "alert" in rule]


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def exported() -> set[str]:
    """Names of all samples that the catalog's families have."""
    histograms = {f.name + suffix for f in catalog.FAMILIES if f.kind == "histogram" for suffix in _SUFFIXES}
    return {f.name for f in catalog.FAMILIES if f.kind != "histogram"} | histograms


def named(text: str) -> set[str]:
    """Names of metrics in PromQL or prose: ours, recorded ones and dcgm-exporter's."""
    return set(re.findall(r"\b(?:stopline[:_][\w:]*\w|DCGM_\w+)", text))


def queries(text: str) -> list[str]:
    """PromQL in the fences of a page, one a line."""
    blocks = re.findall(r"(?ms)^```promql\n(.*?)^```$", text)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)


def amtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["amtool", *map(str, arguments)], capture_output=True, text=True, check=False)


def generate(*arguments: str) -> str:
    command = [sys.executable, str(RULES / "generate.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
