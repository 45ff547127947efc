"""How a labelled scenario is played and judged: what happens to a server, which pages must come of it, for what cause.

Times are those of the rules as they ship divided by SHORTER, so that half an hour passes in three minutes; the engine
is as fast as ever. So a window holds a tenth of the requests that it would hold; stretched by as much again, a scenario
is as long as in production, and takes ten times as long. A scenario begins calm, then something happens, and it goes on
for as long as five minutes and more of the real rules.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import yaml
from replay import Answer, Replica, evaluate
from rules import RULES

from exporter.baseline import Pin
from exporter.config import BaselineConfig
from exporter.simulator import EngineConfig, Poisson
from exporter.simulator.load import Load, Mix, lognormal, requests, uniform
from exporter.strictyaml import Seconds

SHORTER = 10.0
EVERY = 3.0
CALM = 120.0
"""Seconds before something happens, where the baseline is pinned."""
LEARNED = 700.0
"""The same where it is learned: its hour of lag is six minutes here, and there must be 200 requests."""
AFTER = 120.0

SHORT = requests(lognormal(200, 0.4, most=800), uniform(8, 32))
PINS = BaselineConfig(
    pins=(
        Pin("request", 0.99, Seconds(1.0)),
        Pin("queue_wait", 0.99, Seconds(0.002)),
        Pin("step", 0.99, Seconds(0.07)),
    )
)
"""Of SHORT at one request a second: measured on the simulator."""


def _inhibitions() -> dict[str, set[str]]:
    """Alerts by those that silence them, as the Alertmanager example has it."""
    found: dict[str, set[str]] = defaultdict(set)
    config = yaml.safe_load((RULES.parent / "alertmanager/alertmanager.yml").read_text())
    for rule in config["inhibit_rules"]:
        (source,) = re.findall(r'alertname="(\w+)"', " ".join(rule["source_matchers"]))
        for target in re.findall(r"Stopline\w+", " ".join(rule["target_matchers"])):
            found[target].add(source)
    return found


INHIBITED_BY = _inhibitions()


def poisson(rate: float, mix: Mix = SHORT, seed: int = 3) -> Load:
    return Poisson(rate, mix=mix, seed=seed)


@dataclass(frozen=True)
class Scenario:
    """*happens* changes a replica that was calm; *pages* are the critical alerts that must come, and no other."""

    name: str
    happens: Callable[[Replica], None] = lambda replica: None
    pages: tuple[str, ...] = ()
    cause: str = ""
    warns: tuple[str, ...] = ()
    calm_seconds: float = CALM
    after: float = AFTER
    due: float = 0.0
    """Seconds from the beginning until a page is needed: a leak is no incident before it is large."""
    learns: bool = False
    engine: dict[str, object] = field(default_factory=dict)
    replica: dict[str, object] = field(default_factory=dict)
    calm: Callable[[], Load | None] = lambda: poisson(1.0)

    def played_at(self, every: float) -> "Scenario":
        """The same, scraped at another interval."""
        return replace(self, replica=self.replica | {"every": every})

    def play(self, stretch: float = 1.0) -> "Played":
        config = EngineConfig.hy3_h20(**({"model": self.name, "max_running_requests": 16} | self.engine))
        options: dict[str, object] = {"every": EVERY, "iterations": False, "scrape_engine": True, "stretch": stretch}
        options |= self.replica
        if not self.learns:
            options["baseline"] = PINS
        replica = Replica(self.name, config, **options)  # type: ignore[arg-type]
        replica.set_load(self.calm())
        replica.run(LEARNED if self.learns else self.calm_seconds)
        began = replica.now
        self.happens(replica)
        replica.run(self.after - (replica.now - began) / stretch)
        return Played(self, replica, began)


@dataclass(frozen=True)
class Played:
    scenario: Scenario
    replica: Replica
    began: float


@dataclass
class Verdict:
    """What became of one scenario. Times are seconds since its incident began, in the time of the real rules."""

    name: str
    pages: tuple[str, ...]
    cause: str
    warns: tuple[str, ...]
    due: float
    fired: dict[str, float] = field(default_factory=dict)
    found: str = ""
    """The cause that the page told."""
    warned: set[str] = field(default_factory=set)
    usual: dict[str, float] = field(default_factory=dict)
    """The same as *fired*, of the rules that teams have today."""

    @property
    def paged(self) -> dict[str, float]:
        """What is left of it after Alertmanager's inhibitions: of what fires while that which silences it does."""
        silenced = {
            name for name, at in self.fired.items() for by in INHIBITED_BY[name] if self.fired.get(by, at + 1) <= at
        }
        return {name: at for name, at in self.fired.items() if name not in silenced}

    @property
    def right(self) -> bool:
        return set(self.paged) == set(self.pages) and set(self.warns) <= self.warned

    @property
    def cause_right(self) -> bool:
        return not self.cause or self.found == self.cause


_FIRING = 'count by (alertname, severity, pod) (ALERTS{alertstate="firing"})'
_CAUSE = "stopline:latency_cause:top"


def judge(played: list[Played], files: list) -> list[Verdict]:
    """What the rules made of it. *files* are rules with windows divided by SHORTER, and all played at one stretch."""
    every = played[0].replica.every
    end = max(p.replica.now for p in played)
    moments = [every * n for n in range(int(min(p.began for p in played) / every), int(end / every))]
    answers = evaluate(
        [p.replica for p in played], files, {_FIRING: moments, _CAUSE: moments}, interval=f"{every * 1000:.0f}ms"
    )
    return [_verdict(one, answers, moments) for one in played]


def _verdict(one: Played, answers: dict[tuple[str, float], Answer], moments: list[float]) -> Verdict:
    told = one.scenario
    verdict = Verdict(told.name, told.pages, told.cause, told.warns, told.due * SHORTER)
    for moment in moments:
        since = (moment - one.began) * SHORTER / one.replica.stretch
        for labels, _ in _of(one, answers[_FIRING, moment]):
            name, severity = labels["alertname"], labels["severity"]
            if severity == "usual":
                verdict.usual.setdefault(name, since)
            elif severity == "critical":
                if name == "StoplineLatencyDoubled" and name not in verdict.fired:
                    verdict.found = next((c["cause"] for c, _ in _of(one, answers[_CAUSE, moment])), "")
                verdict.fired.setdefault(name, since)
            elif since > 0:
                verdict.warned.add(name)
    return verdict


def _of(one: Played, answer: Answer) -> Answer:
    return [(labels, value) for labels, value in answer if labels.get("pod") == one.scenario.name]
