"""The live page judges as Prometheus' rules do: the same incidents, the same moments, the same lines."""

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from incidents import EVERY, SCENARIOS, SHORTER, Scenario
from replay import Replica, evaluate
from rules import generate

from exporter.judge import Verdict, judge

LINES = ("latency", "errors", "memory")
CALM = {line: ["ok"] for line in LINES}
STATES = {  # of each line from the incident on, each once until it changes
    "blip": CALM | {"latency": ["ok", "rising", "tripped", "rising", "ok"]},
    "slow-step-learned": CALM | {"latency": ["ok", "rising", "tripped"]},
    "cache-full": CALM | {"latency": ["ok", "tripped"], "memory": ["ok", "rising", "tripped"]},
    "out-of-memory": CALM | {"latency": ["ok", "unknown"], "errors": ["ok", "tripped"]},
    "killed-unsaid": CALM | {"latency": ["ok", "unknown"], "errors": ["ok", "unknown", "tripped"]},
    "hang": CALM | {"errors": ["ok", "tripped"]},
    "planned-restart": CALM | {"latency": ["ok", "unknown", "ok"], "errors": ["ok", "unknown", "ok"]},
    "one-error": CALM | {"errors": ["ok", "tripped", "rising"]},
    "leak": CALM | {"memory": ["ok", "tripped"]},
}
"""Prometheus' own verdict has tripped in the same places; what it cannot judge, it has alerts of their own for."""
LATE = EVERY
"""One evaluation, half a minute of the real rules: a scrape may come that late, and Prometheus extrapolates."""
DIP = 2 * EVERY
"""So long may one of the two miss a peak of a gauge that the other sees: they look at different moments."""


NOT_NEEDED = re.compile("alerts|cause|capacity|inputs")
"""Groups that stopline:tripped does not rest on."""


def without_dips(tripped: dict[float, bool]) -> dict[float, bool]:
    on = [at for at, is_on in tripped.items() if is_on]
    dips = [(a, b) for a, b in pairwise(on) if EVERY < b - a <= DIP + EVERY]
    return {at: is_on or any(a < at < b for a, b in dips) for at, is_on in tripped.items()}


@dataclass
class Watched:
    """A scenario's replica, and what its page said whenever Prometheus scraped it."""

    scenario: Scenario
    replica: Replica
    began: float
    said: dict[float, tuple[Verdict, ...]] = field(default_factory=dict)

    def tripped(self, line: str) -> dict[float, bool]:
        return {at: verdicts[LINES.index(line)].state == "tripped" for at, verdicts in self.said.items()}

    def states(self, line: str) -> list[str]:
        found = [v[LINES.index(line)].state for at, v in self.said.items() if at >= self.began]
        return [state for n, state in enumerate(found) if n == 0 or found[n - 1] != state]


def watch(scenario: Scenario) -> Watched:
    """Play *scenario* with a page whose windows are shortened as the rules' are."""
    said: dict[float, tuple[Verdict, ...]] = {}

    def note(replica: Replica) -> None:
        said[round(replica.now, 3)] = judge(replica.sidecar.live.evidence())

    played = replace(scenario, replica=scenario.replica | {"pace": SHORTER, "sampled": note}).play()
    return Watched(scenario, played.replica, played.began, said)


@pytest.fixture(scope="module")
def watched() -> dict[str, Watched]:
    return {scenario.name: watch(scenario) for scenario in SCENARIOS if scenario.name in STATES}


def test_the_page_and_prometheus_have_the_same_lines_tripped_at_the_same_moments(
    watched: dict[str, Watched], tmp_path: Path
) -> None:
    groups = yaml.safe_load(generate("--form", "rules", "--shorten", f"{SHORTER:g}"))["groups"]
    rules = tmp_path / "fast.yaml"
    rules.write_text(yaml.dump({"groups": [group for group in groups if not NOT_NEEDED.search(group["name"])]}))
    moments = sorted({at for each in watched.values() for at in each.said})
    replicas, every = [each.replica for each in watched.values()], f"{EVERY * 1000:.0f}ms"
    answers = evaluate(replicas, [rules], {"stopline:tripped": moments}, interval=every)
    theirs: dict[tuple[str, str], dict[float, bool]] = {}
    for at in moments:
        for labels, value in answers["stopline:tripped", at]:
            theirs.setdefault((labels["pod"], labels["line"]), {})[at] = value > 0
    assert {line for name, line in theirs if any(theirs[name, line].values())} == set(LINES)
    apart = [
        (name, line, at)
        for name, each in watched.items()
        for line in LINES
        for pair in [(without_dips(each.tripped(line)), without_dips(theirs[name, line]))]
        for one, other in (pair, pair[::-1])
        for at, tripped in one.items()
        if at in each.said and tripped not in {other.get(at + late) for late in (-LATE, 0.0, LATE)}
    ]
    assert apart == []


def test_each_incident_shows_as_these_states_one_after_the_other(watched: dict[str, Watched]) -> None:
    assert {name: {line: each.states(line) for line in LINES} for name, each in watched.items()} == STATES


def test_the_cause_is_that_of_the_rules(watched: dict[str, Watched]) -> None:
    """The rules' own causes are compared with these names in test_replay."""
    causes = {
        (name, verdict.line): verdict.cause
        for name, each in watched.items()
        for verdict in list(each.said.values())[-1]
        if verdict.state == "tripped"
    }
    assert causes == {
        ("slow-step-learned", "latency"): "step",
        ("cache-full", "latency"): "kv_cache",
        ("cache-full", "memory"): "kv_cache",
        ("out-of-memory", "errors"): "out_of_memory",
        ("killed-unsaid", "errors"): "phase_dead",
        ("hang", "errors"): "stalled",
        ("leak", "memory"): "growth",
    }
