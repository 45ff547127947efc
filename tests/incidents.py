"""Labelled scenarios: what happens to a server, which pages must come of it, and for what cause.

Times are those of the rules as they ship divided by SHORTER, so that half an hour passes in three minutes; the engine
is as fast as ever. A scenario begins calm, then something happens, and it goes on for as long as five minutes and more
of the real rules.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import yaml
from replay import Answer, Replica, evaluate
from rules import RULES

from exporter.baseline import Pin
from exporter.config import BaselineConfig
from exporter.simulator import ClosedLoop, EngineConfig, Poisson
from exporter.simulator.load import Bursts, Load, Mix, fixed, lognormal, requests, uniform
from exporter.strictyaml import Seconds

SHORTER = 10.0
EVERY = 3.0
CALM = 120.0
"""Seconds before something happens, where the baseline is pinned."""
LEARNED = 700.0
"""The same where it is learned: its hour of lag is six minutes here, and there must be 200 requests."""
AFTER = 120.0

SHORT = requests(lognormal(200, 0.4, most=800), uniform(8, 32))
LONG_ANSWERS = requests(lognormal(200, 0.4, most=800), uniform(60, 160))
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
    after: float = AFTER
    learns: bool = False
    engine: dict[str, object] = field(default_factory=dict)
    replica: dict[str, object] = field(default_factory=dict)
    calm: Callable[[], Load | None] = lambda: poisson(1.0)

    def play(self) -> "Played":
        config = EngineConfig.hy3_h20(**({"model": self.name, "max_running_requests": 16} | self.engine))
        options: dict[str, object] = {"every": EVERY, "iterations": False} | self.replica
        if not self.learns:
            options["baseline"] = PINS
        replica = Replica(self.name, config, **options)  # type: ignore[arg-type]
        replica.set_load(self.calm())
        replica.run(LEARNED if self.learns else CALM)
        began = replica.now
        self.happens(replica)
        replica.run(began + self.after - replica.now)
        return Played(self, replica, began)


@dataclass
class Played:
    scenario: Scenario
    replica: Replica
    began: float
    fired: dict[str, float] = field(default_factory=dict)
    """Seconds from the beginning of the incident to each page, in the time of the real rules."""
    warned: set[str] = field(default_factory=set)
    cause: str = ""

    @property
    def paged(self) -> dict[str, float]:
        """What is left of it after Alertmanager's inhibitions."""
        return {name: at for name, at in self.fired.items() if not INHIBITED_BY.get(name, set()) & self.fired.keys()}

    @property
    def right(self) -> bool:
        return set(self.paged) == set(self.scenario.pages) and set(self.scenario.warns) <= self.warned

    @property
    def cause_right(self) -> bool:
        return not self.scenario.cause or self.cause == self.scenario.cause


_FIRING = 'count by (alertname, severity, pod) (ALERTS{alertstate="firing"})'
_CAUSE = "stopline:latency_cause:top"


def judge(played: list[Played], files: list) -> None:
    """Fill in what the rules made of it. *files* are rules with windows divided by SHORTER."""
    end = max(p.began + p.scenario.after for p in played)
    moments = [2 * EVERY * n for n in range(1, int(end / (2 * EVERY)))]
    answers = evaluate(
        [p.replica for p in played], files, {_FIRING: moments, _CAUSE: moments}, interval=f"{EVERY * 1000:.0f}ms"
    )
    for one in played:
        for moment in moments:
            for labels, _ in _of(one, answers[_FIRING, moment]):
                if labels["severity"] == "critical":
                    if labels["alertname"] not in one.fired and labels["alertname"] == "StoplineLatencyDoubled":
                        one.cause = next((c["cause"] for c, _ in _of(one, answers[_CAUSE, moment])), "")
                    one.fired.setdefault(labels["alertname"], (moment - one.began) * SHORTER)
                elif moment > one.began:
                    one.warned.add(labels["alertname"])


def _of(one: Played, answer: Answer) -> Answer:
    return [(labels, value) for labels, value in answer if labels.get("pod") == one.scenario.name]


# what happens


def _load(load: Callable[[], Load | None]) -> Callable[[Replica], None]:
    return lambda replica: replica.set_load(load())


def _overload(replica: Replica) -> None:
    replica.set_load(poisson(30.0))


def _blip(replica: Replica) -> None:
    replica.set_load(poisson(30.0))
    replica.run(3)
    replica.set_load(poisson(1.0))


def _fail(kind: str) -> Callable[[Replica], None]:
    return lambda replica: replica.engine.fail(kind)  # type: ignore[arg-type]


def _vanish(replica: Replica) -> None:
    replica.server.broken = "refused"
    replica.set_load(None)


def _mute(replica: Replica) -> None:
    replica.server.broken = "timeout"
    replica.set_load(None)


def _planned(replica: Replica) -> None:
    replica.set_load(None)
    replica.engine.stop()
    replica.run(30)
    replica.engine.restart()
    replica.set_load(poisson(1.0))


def _restart_sidecar(replica: Replica) -> None:
    replica.restart_sidecar()


def _overload_and_restart(replica: Replica) -> None:
    replica.set_load(poisson(30.0))
    replica.run(20)
    replica.restart_sidecar()


def _gaps(replica: Replica) -> None:
    for _ in range(6):
        replica.scraped = False
        replica.run(EVERY)
        replica.scraped = True
        replica.run(3 * EVERY)


def _unscraped(replica: Replica) -> None:
    replica.scraped = False


def _one_error(replica: Replica) -> None:
    replica.answer_with(500)


DOUBLED, FAILED, STALLED = "StoplineLatencyDoubled", "StoplineEngineFailed", "StoplineEngineStalled"
MEMORY, RATE = "StoplineMemoryNearLimit", "StoplineErrorRateHigh"
SMALL_CACHE = {"kv_blocks": 200, "max_model_len": 2048}

SCENARIOS = (
    Scenario("healthy"),
    Scenario("busy", _load(lambda: poisson(6.0))),
    Scenario("idle", _load(lambda: None)),
    Scenario("blip", _blip),
    Scenario("bursts", _load(lambda: Bursts(8, 10.0, mix=SHORT, seed=2))),
    Scenario("overload", _overload, (DOUBLED,), "queue"),
    Scenario("overload-learned", _overload, (DOUBLED,), "queue", learns=True),
    Scenario("slow-step", lambda r: r.engine.slow(3), (DOUBLED,), "step"),
    Scenario("slow-step-learned", lambda r: r.engine.slow(3), (DOUBLED,), "step", learns=True),
    Scenario(
        "bigger-batch",
        _load(lambda: ClosedLoop(96, mix=requests(fixed(16), uniform(16, 32)), seed=2)),
        (DOUBLED,),
        "step",
        engine={"max_running_requests": 128},
        learns=True,
    ),
    Scenario("long-answers", _load(lambda: poisson(1.0, LONG_ANSWERS)), (DOUBLED,), "request_mix", learns=True),
    Scenario(
        "cache-full",
        _load(lambda: ClosedLoop(14, mix=requests(fixed(400), uniform(100, 200)), seed=2)),
        (DOUBLED, MEMORY),
        "kv_cache",
        engine=SMALL_CACHE,
    ),
    Scenario("leak", lambda r: r.engine.leak(2.5e8), (MEMORY,), learns=True, after=30),
    Scenario("out-of-memory", _fail("out_of_memory"), (FAILED,)),
    Scenario("cuda", _fail("cuda"), (FAILED,)),
    Scenario("collective", _fail("collective"), (FAILED,)),
    Scenario("engine-dead", _fail("engine_dead"), (FAILED,)),
    Scenario("worker-dead", _fail("worker_dead"), (FAILED,)),
    Scenario("killed-unsaid", _vanish, (FAILED,)),
    Scenario("killed-unlogged", _vanish, (FAILED,), replica={"log": False}),
    Scenario("silent", _mute, (FAILED,)),
    Scenario("hang", _fail("hang"), (STALLED,), calm=lambda: poisson(6.0)),
    Scenario("planned-restart", _planned),
    Scenario("sidecar-restart", _restart_sidecar),
    Scenario("overload-sidecar-restart", _overload_and_restart, (DOUBLED,), "queue"),
    Scenario("scrape-gaps", _gaps),
    Scenario("not-scraped", _unscraped, warns=("StoplineSidecarDown",)),
    Scenario(
        "aborts", _load(lambda: poisson(1.0, requests(lognormal(200, 0.4, most=800), uniform(8, 32), aborted=0.5)))
    ),
    Scenario("too-long", _load(lambda: poisson(1.0, requests(fixed(40_000), fixed(8))))),
    Scenario("one-error", _one_error, warns=("StoplineErrorsAppeared",)),
)
