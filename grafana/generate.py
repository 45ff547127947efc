#!/usr/bin/env python3
"""The boards in every form in which they are committed; the modules in boards/ are the source.

    generate.py              # writes them into this checkout
    generate.py --to PATH    # the same files elsewhere, to compare

As JSON for Grafana; and beside it what makes ConfigMaps of them, for the sidecar that looks for grafana_dashboard.
"""

import argparse
import json
from pathlib import Path

from boards import BOARDS
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

ROOT = Path(__file__).parent.parent
DASHBOARDS = Path("grafana/dashboards")
SCHEMA = 39
"""Of Grafana 10; newer ones bring a board up to theirs when they load it."""
KUSTOMIZATION = """\
# Made by grafana/generate.py, for deploy/kustomize/boards: kustomize reads files beside this one alone.
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
configMapGenerator:
{maps}
generatorOptions:
  disableNameSuffixHash: true # a board keeps its place when it changes
  labels: {{grafana_dashboard: '1'}}
"""


def files() -> dict[Path, str]:
    """Everything that is made, by its path in the checkout."""
    made = {f"{module.UID}.json": text(module.board()) for module in BOARDS}
    maps = "".join(f"  - {{name: {name.removesuffix('.json')}, files: [{name}]}}\n" for name in made)
    return {
        **{DASHBOARDS / name: content for name, content in made.items()},
        DASHBOARDS / "kustomization.yaml": KUSTOMIZATION.format(maps=maps.rstrip()),
    }


def text(board: Dashboard) -> str:
    """Grafana's JSON, in which every panel has a number that its links can name."""
    found = json.loads(json.dumps(board.build(), cls=JSONEncoder))
    for number, panel in enumerate(found["panels"], 1):
        panel["id"] = number
    return json.dumps(found | {"schemaVersion": SCHEMA}, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--to", type=Path, default=ROOT, metavar="PATH", help="where, in place of this checkout")
    given = parser.parse_args()
    for path, content in files().items():
        target = given.to / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)


if __name__ == "__main__":
    main()
