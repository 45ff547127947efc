"""The incident bench: every scenario through simulator, sidecar and rules; fired or not, after how long, for which cause.

make bench-alerts
.venv/bin/python tests/bench/alerts.py [--seeds 3] [--real-time] [NAME...]

Beside it, the same scenarios judged by the alerts that teams have today (usual.yaml), and a second table of the two.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))

from incidents import SHORTER, Scenario, Verdict, judge
from rules import RULES, alerts, generate
from scenarios import DOUBLED, FAILED, MEMORY, RATE, SCENARIOS, STALLED

sys.path.insert(0, str(RULES))
from generate import shortened

USUAL = yaml.safe_load((Path(__file__).parent / "usual.yaml").read_text())["groups"]
_AT_ONCE = 6  # scenarios in one run of promtool
_UNITS = {"s": 1, "m": 60, "h": 3600}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1, help="play each scenario so many times")
    parser.add_argument("--real-time", action="store_true", help="as long as in production: ten times the work")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="so many at a time")
    given = parser.parse_args()
    unknown = set(given.names) - {scenario.name for scenario in SCENARIOS}
    if unknown:
        parser.error(f"no scenario is called {', '.join(sorted(unknown))}")
    began = time.monotonic()
    chosen = [
        replace(scenario, replica=scenario.replica | {"seed": seed})
        for seed in range(1, given.seeds + 1)
        for scenario in SCENARIOS
        if not given.names or scenario.name in given.names
    ]
    with ProcessPoolExecutor(given.jobs) as pool:
        stretch = SHORTER if given.real_time else 1.0
        parts = pool.map(_play, [(stretch, [(s.name, s.replica["seed"]) for s in part]) for part in _parts(chosen)])
        judged = [one for part in parts for one in part]
    print("| scenario | must page | paged after (s) | within 2 min of its own wait | cause | |")
    print("|---|---|---|---|---|---|")
    for row in map(_row, judged):
        print(f"| {' | '.join(row)} |")
    failed = _score(judged, time.monotonic() - began)
    _side_by_side(judged)
    return failed


def _parts(chosen: Sequence[Scenario]) -> Iterator[Sequence[Scenario]]:
    """Those that learn last longer, so they go together: one run of promtool ends when its last scenario does."""
    ordered = sorted(chosen, key=lambda scenario: (scenario.learns, scenario.calm_seconds + scenario.after))
    return (ordered[first : first + _AT_ONCE] for first in range(0, len(ordered), _AT_ONCE))


def _play(given: tuple[float, Sequence[tuple[str, int]]]) -> list[Verdict]:
    stretch, part = given
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    scenarios = [replace(by_name[name], replica=by_name[name].replica | {"seed": seed}) for name, seed in part]
    played = [scenario.play(stretch) for scenario in scenarios]
    factor = SHORTER / stretch
    with tempfile.TemporaryDirectory() as directory:
        ours, usual = Path(directory) / "ours.yaml", Path(directory) / "usual.yaml"
        ours.write_text(generate("--form", "rules", "--shorten", f"{factor:g}"))
        usual.write_text(yaml.safe_dump({"groups": shortened(USUAL, factor)}))
        return judge(played, [ours, usual])


def _row(one: Verdict) -> Iterator[str]:
    yield one.name
    yield ", ".join(name.removeprefix("Stopline") for name in one.pages) or "nobody"
    yield ", ".join(f"{name.removeprefix('Stopline')} {at:.0f}" for name, at in one.paged.items()) or "-"
    yield ("yes" if _in_time(one) else "NO") if one.pages else "-"
    yield f"{one.found} ({one.cause})" if one.cause else "-"
    missing = "".join(f", no {name.removeprefix('Stopline')}" for name in sorted(set(one.warns) - one.warned))
    yield ("right" if one.right and one.cause_right else "WRONG") + missing


def _in_time(one: Verdict) -> bool:
    return all(one.paged.get(name, 1e9) <= one.due + _wait(name) + 120 for name in one.pages)


def _wait(name: str) -> float:
    """Seconds of the alert's ``for``; that nothing comes for two minutes is a window of its expression."""
    text = min((alert.get("for", "0s") for alert in alerts() if alert["alert"] == name), key=len)
    return float(text[:-1]) * _UNITS[text[-1]] + (120 if name == STALLED else 0)


def _score(judged: list[Verdict], seconds: float) -> int:
    needed = [v for v in judged if v.pages]
    calm = [v for v in judged if not v.pages]
    caused = [v for v in judged if v.cause]
    warned = [v for v in judged if v.warns]
    print(f"\n{len(judged)} scenarios in {seconds:.0f} s")
    print(f"paged as needed: {sum(set(v.pages) <= set(v.paged) for v in needed)} of {len(needed)}")
    print(f"and by nothing else: {sum(set(v.pages) == set(v.paged) for v in needed)} of {len(needed)}")
    print(f"in time: {sum(map(_in_time, needed))} of {len(needed)}")
    print(f"paged without need: {sum(bool(v.paged) for v in calm)} of {len(calm)} that need none")
    print(f"cause right: {sum(v.cause_right for v in caused)} of {len(caused)}")
    print(f"warned where nobody need get up: {sum(set(v.warns) <= v.warned for v in warned)} of {len(warned)}")
    return int(not all(v.right for v in judged))


def _side_by_side(judged: list[Verdict]) -> None:
    """How many incidents each rule told, and on how many quiet days it told one."""
    names = [rule["alert"] for group in USUAL for rule in group["rules"]]
    rules: dict[str, Callable[[Verdict], bool]] = {name: lambda v, name=name: name in v.usual for name in names}
    rules |= {"all six of them": lambda v: bool(v.usual), "Stopline": lambda v: bool(v.paged)}
    kinds = {
        "latency": [v for v in judged if DOUBLED in v.pages],
        "errors": [v for v in judged if {FAILED, STALLED, RATE} & set(v.pages)],
        "memory": [v for v in judged if MEMORY in v.pages and DOUBLED not in v.pages],
        "quiet": [v for v in judged if not v.pages],
    }
    print("\n| rule | latency told | errors told | memory told | quiet days with a page |")
    print("|---|---|---|---|---|")
    for name, told in rules.items():
        print(f"| {name} | {' | '.join(f'{sum(map(told, of))} of {len(of)}' for of in kinds.values())} |")


if __name__ == "__main__":
    sys.exit(main())
