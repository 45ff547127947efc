"""Whether the live page and Prometheus' rules say the same of the three lines, at every moment of a scenario.

Of each line both say one of three things: it is over, it cannot be judged, or neither. The page's *rising* is the last.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise, takewhile
from pathlib import Path

import yaml
from incidents import EVERY, SHORTER, Scenario
from replay import Replica, evaluate, thin_out
from rules import generate

from exporter.judge import Verdict, judge

LINES = ("latency", "errors", "memory")
OVER, UNKNOWN = "tripped", "unknown"
"""What becomes a page soon may be *unknown* to one of the two until then."""
LATE = {OVER: EVERY, UNKNOWN: 3 * EVERY}
"""Seconds by which one of the two may be later. One evaluation, half a minute of the real rules: a scrape may come that
late, and Prometheus extrapolates. That something is missing the rules say once it was for a minute: what is over by
then, only the page says."""
DIP = 2 * EVERY
"""So long may one of the two miss a peak of a gauge that the other sees: they look at different moments."""
NOT_NEEDED = re.compile("alerts|cause|capacity|boards|layouts")
"""Groups that neither stopline:tripped nor stopline:judged rests on."""


@dataclass
class Watched:
    """A scenario's replica, and what its page said whenever Prometheus scraped it."""

    scenario: Scenario
    replica: Replica
    began: float
    said: dict[float, tuple[Verdict, ...]] = field(default_factory=dict)

    def verdicts(self, line: str) -> dict[float, Verdict]:
        return {at: verdicts[LINES.index(line)] for at, verdicts in self.said.items()}

    def states(self, line: str) -> list[str]:
        """From the incident on, each once until it changes."""
        found = [verdict.state for at, verdict in self.verdicts(line).items() if at >= self.began]
        return [state for n, state in enumerate(found) if n == 0 or found[n - 1] != state]


@dataclass(frozen=True)
class Apart:
    """A moment at which only one of the two says *what* of a line."""

    scenario: str
    line: str
    what: str
    at: float
    by: str


def watch(scenario: Scenario) -> Watched:
    """Play *scenario* with a page whose windows are shortened as the rules' are."""
    said: dict[float, tuple[Verdict, ...]] = {}

    def note(replica: Replica) -> None:
        if replica.scraped:
            said[round(replica.now, 3)] = judge(replica.sidecar.live.evidence())

    played = replace(scenario, replica=scenario.replica | {"pace": SHORTER, "sampled": note}).play()
    return Watched(scenario, played.replica, played.began, said)


def compare(watched: Sequence[Watched], directory: Path) -> tuple[list[Apart], set[str]]:
    """Where the two are apart; and the lines that were over at some moment, so that it is known to be no empty test."""
    groups = yaml.safe_load(generate("--form", "rules", "--shorten", f"{SHORTER:g}"))["groups"]
    rules = directory / "fast.yaml"
    needed = [group for group in groups if not NOT_NEEDED.search(group["name"])]
    for group in needed:
        thin_out(group, EVERY)
    rules.write_text(yaml.dump({"groups": needed}))
    moments = sorted({at for each in watched for at in each.said})
    asked = {"stopline:tripped": moments, "stopline:judged": moments}
    answers = evaluate([each.replica for each in watched], [rules], asked, interval=f"{EVERY * 1000:.0f}ms")
    told: dict[str, dict[tuple[str, str], dict[float, bool]]] = {name: defaultdict(dict) for name in asked}
    for (name, at), answer in answers.items():
        for labels, value in answer:
            told[name][labels["pod"], labels["line"]][at] = value > 0
    apart: list[Apart] = []
    for each in watched:
        for line in LINES:
            over, judged = (told[name][each.scenario.name, line] for name in asked)
            verdicts = each.verdicts(line)
            page = {
                OVER: _without_dips({at: verdict.state == OVER for at, verdict in verdicts.items()}),
                UNKNOWN: {at: verdict.state == UNKNOWN for at, verdict in verdicts.items()},
            }
            rules_say = {
                OVER: _without_dips(over),
                UNKNOWN: {at: not judged.get(at) and not over.get(at) for at in verdicts},
            }
            # A provisional baseline only the page has: README, what only Prometheus can.
            own = [at for at, verdict in verdicts.items() if verdict.baseline_source != "provisional"]
            for by, one, other in (("page", page, rules_say), ("rules", rules_say, page)):
                found = _apart(one[OVER], [other[OVER]], verdicts, LATE[OVER])
                apart += [Apart(each.scenario.name, line, OVER, at, by) for at in found]
                found = _apart(one[UNKNOWN], [other[UNKNOWN], other[OVER]], own, LATE[UNKNOWN])
                apart += [Apart(each.scenario.name, line, UNKNOWN, at, by) for at in found]
    return apart, {line for (_, line), values in told["stopline:tripped"].items() if any(values.values())}


def _apart(
    one: Mapping[float, bool], others: Sequence[Mapping[float, bool]], moments: Iterable[float], late: float
) -> list[float]:
    """Moments at which *one* says it, and none of the *others* does so then, or shortly before or after."""
    steps = [n * EVERY for n in range(-round(late / EVERY), round(late / EVERY) + 1)]
    found = [
        at
        for at in moments
        if one.get(at) and not any(other.get(round(at + step, 3)) for other in others for step in steps)
    ]
    return [at for at in found if _in_a_row(one, at) * EVERY > late - EVERY]


def _in_a_row(one: Mapping[float, bool], at: float) -> int:
    """How many evaluations around *at* say it, one after the other."""
    ways = (takewhile(lambda n: one.get(round(at + n * EVERY, 3)), count(way, way)) for way in (-1, 1))
    return 1 + sum(len(list(way)) for way in ways)


def _without_dips(over: Mapping[float, bool]) -> dict[float, bool]:
    on = [at for at, is_on in over.items() if is_on]
    dips = [(a, b) for a, b in pairwise(on) if EVERY < b - a <= DIP + EVERY]
    return {at: is_on or any(a < at < b for a, b in dips) for at, is_on in over.items()}
