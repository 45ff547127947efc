"""Whether the live page ever says other than the rules: the scenarios of the incident bench, moment by moment.

make bench-page
.venv/bin/python tests/bench/page.py [--jobs 2] [NAME...]
"""

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from agreement import LINES, Apart, compare, watch
from scenarios import SCENARIOS

_AT_ONCE = 4  # scenarios in one run of promtool


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="so many at a time")
    given = parser.parse_args()
    known = {scenario.name: scenario for scenario in SCENARIOS}
    if unknown := set(given.names) - set(known):
        parser.error(f"no scenario is called {', '.join(sorted(unknown))}")
    began = time.monotonic()
    whole = [
        name for name in known if "sidecar-restart" not in name
    ]  # a page that was just started knows of nothing before
    names = sorted(given.names or whole, key=lambda name: (known[name].learns, known[name].after))
    parts = [names[first : first + _AT_ONCE] for first in range(0, len(names), _AT_ONCE)]
    moments, apart = 0, list[Apart]()
    with ProcessPoolExecutor(given.jobs) as pool:
        for number, (compared, found) in enumerate(pool.map(_play, parts), 1):
            moments += compared
            apart += found
            print(f"{number} of {len(parts)} parts after {time.monotonic() - began:.0f} s", file=sys.stderr)
    print("| scenario | line | said by one alone | by | moments | at (s) |")
    print("|---|---|---|---|---|---|")
    for key, those in groupby(apart, key=lambda one: (one.scenario, one.line, one.what, one.by)):
        at = [one.at for one in those]
        print(f"| {' | '.join(key)} | {len(at)} | {', '.join(f'{each:g}' for each in at[:6])} |")
    print(f"\n{len(names)} scenarios, {moments} moments of {len(LINES)} lines each: {len(apart)} apart")
    return int(bool(apart))


def _play(names: list[str]) -> tuple[int, list[Apart]]:
    watched = [watch(scenario) for scenario in SCENARIOS if scenario.name in names]
    with tempfile.TemporaryDirectory() as directory:
        apart, _ = compare(watched, Path(directory))
    return sum(len(each.said) for each in watched), apart


if __name__ == "__main__":
    sys.exit(main())
