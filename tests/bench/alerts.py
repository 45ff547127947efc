"""The incident bench: every scenario through simulator, sidecar and rules; fired or not, after how long, for which cause.

make bench-alerts
.venv/bin/python tests/bench/alerts.py [--seeds 3] [NAME...]
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from incidents import SCENARIOS, SHORTER, Played, judge
from rules import alerts, generate

_AT_ONCE = 6  # scenarios in one run of promtool
_UNITS = {"s": 1, "m": 60, "h": 3600}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1, help="play each scenario so many times")
    given = parser.parse_args()
    began = time.monotonic()
    played = [
        replace(scenario, replica=scenario.replica | {"seed": seed}).play()
        for seed in range(1, given.seeds + 1)
        for scenario in SCENARIOS
        if not given.names or scenario.name in given.names
    ]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "fast.yaml"
        file.write_text(generate("--form", "rules", "--shorten", f"{SHORTER:g}"))
        for first in range(0, len(played), _AT_ONCE):
            judge(played[first : first + _AT_ONCE], [file])
    print("| scenario | must page | paged after (s) | within 2 min of its own wait | cause | |")
    print("|---|---|---|---|---|---|")
    for row in map(_row, played):
        print(f"| {' | '.join(row)} |")
    return _score(played, time.monotonic() - began)


def _row(one: Played) -> Iterator[str]:
    yield one.scenario.name
    yield ", ".join(name.removeprefix("Stopline") for name in one.scenario.pages) or "nobody"
    yield ", ".join(f"{name.removeprefix('Stopline')} {at:.0f}" for name, at in one.paged.items()) or "-"
    yield "yes" if _in_time(one) else "NO"
    yield f"{one.cause} ({one.scenario.cause})" if one.scenario.cause else "-"
    yield "right" if one.right and one.cause_right else "WRONG"


def _in_time(one: Played) -> bool:
    return all(one.paged.get(name, 1e9) <= _wait(name) + 120 for name in one.scenario.pages)


def _wait(name: str) -> float:
    """Seconds of the alert's ``for``."""
    text = min((alert.get("for", "0s") for alert in alerts() if alert["alert"] == name), key=len)
    return float(text[:-1]) * _UNITS[text[-1]]


def _score(played: list[Played], seconds: float) -> int:
    needed = [p for p in played if p.scenario.pages]
    calm = [p for p in played if not p.scenario.pages]
    caused = [p for p in played if p.scenario.cause]
    print(f"\n{len(played)} scenarios in {seconds:.0f} s")
    print(f"paged as needed: {sum(set(p.scenario.pages) <= set(p.paged) for p in needed)} of {len(needed)}")
    print(f"in time: {sum(map(_in_time, needed))} of {len(needed)}")
    print(f"paged without need: {sum(bool(p.paged) for p in calm)} of {len(calm)} that need none")
    print(f"cause right: {sum(p.cause_right for p in caused)} of {len(caused)}")
    return int(not all(p.right for p in played))


if __name__ == "__main__":
    sys.exit(main())
