"""A fleet on the simulator that goes through incidents, inside a real Prometheus: what the boards are tried on.

Each replica is calm first, long enough for a baseline to be learned, and then one thing happens to it. Everything is
played at a pace: at 1 the rules are those that ship, at 10 all their durations are a tenth, and so are the fleet's.
"""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import boards
import yaml
from incidents import SHORT
from realengine import free_port
from replay import Answer, Replica, evaluate, thin_out, told
from rules import generate
from scenarios import SMALL_CACHE

from exporter.config import HistogramConfig, LogConfig
from exporter.engines import profile
from exporter.simulator import ClosedLoop, EngineConfig, Poisson
from exporter.simulator.load import fixed, requests, uniform

FIXTURES = Path(__file__).parent / "fixtures/vllm/0.32.0"
BEGAN = 1_764_500_400.0
"""Unix time at which the story begins: 2025-11-30 11:00 UTC."""
CALM, LASTS = 5400.0, 1200.0
"""Seconds, at pace 1, until the incidents begin, and from then to the end."""
_SAMPLE_EVERY, _RULES_EVERY = 30.0, 30.0
_COARSE: dict[str, Any] = {"poll": 2.0, "histograms": HistogramConfig(factor=1.3)}
"""Settings with which the whole story is cheap enough for every run of the tests."""
_OWN_FIELDS = LogConfig(
    fields={name: profile.bundled("generic").log.fields[name] for name in ("step_ms", "all_reduce_ms")}
)
_LAYOUTS = {
    8: {"weights_bytes": 40_000_000_000, "step_base_seconds": 0.0245, "step_per_decode_seconds": 0.00055},
    4: {"weights_bytes": 72_000_000_000, "step_base_seconds": 0.0200, "step_per_decode_seconds": 0.00120},
}


@dataclass(frozen=True)
class Member:
    """*happens* is told the replica and how many seconds are left; what it does not use up passes quietly."""

    pod: str
    happens: Callable[[Replica, float], None] = lambda replica, seconds: None
    calm: Callable[[Replica, float], None] = lambda replica, seconds: replica.set_load(Poisson(2.0, mix=SHORT, seed=3))
    engine: dict[str, Any] = field(default_factory=dict)
    replica: dict[str, Any] = field(default_factory=dict)

    def play(self, pace: float) -> Replica:
        config = EngineConfig.hy3_h20(**({"max_running_requests": 16, "tensor_parallel": 2} | self.engine))
        replica = Replica(
            self.pod,
            config,
            every=_SAMPLE_EVERY / pace,
            iterations=False,
            also=frozenset(boards.sampled()),
            **((_COARSE if pace > 5 else {}) | self.replica),
        )
        for act, until in ((self.calm, CALM / pace), (self.happens, (CALM + LASTS) / pace)):
            act(replica, until - replica.now)
            replica.run(max(0.0, until - replica.now))
        return replica


def _slow(replica: Replica, seconds: float) -> None:
    replica.engine.slow(3)


def _overload(replica: Replica, seconds: float) -> None:
    replica.set_load(Poisson(18.0, mix=SHORT, seed=4))


def _fail(replica: Replica, seconds: float) -> None:
    for _ in range(20):
        replica.run(seconds / 60)
        replica.answer_with(500)
    replica.engine.fail("cuda")


def _leak(replica: Replica, seconds: float) -> None:
    """Until half a GiB is left of each GPU; the server lives on at that."""
    free = replica.engine.config.gpu_memory_bytes - replica.engine.gpu_memory_used_bytes
    replica.engine.leak((free - 2**29) / (0.8 * seconds))
    replica.run(0.8 * seconds)
    replica.engine.leak(0)


def _fill_cache(replica: Replica, seconds: float) -> None:
    replica.set_load(ClosedLoop(14, mix=requests(fixed(400), uniform(100, 200)), seed=2))


def _unseen(replica: Replica, seconds: float) -> None:
    replica.scraped = False


def _communicate(replica: Replica, seconds: float, *, share: float, balance: float) -> None:
    """A server whose log tells its steps, the collectives in them, and the balance of its experts."""
    step = 40 / (1 - share)
    for _ in range(int(seconds)):
        replica.log(f"INFO 11-30 09:00:01 [stats.py:1] step_ms={step:.1f} all_reduce_ms={step * share:.1f}")
        replica.log(
            "INFO 11-30 09:00:01 [eplb_state.py:500] EPLB step: 10 for model hy3: avg_tokens=10.00, max_tokens=12, "
            f"balancedness={balance:.2f}, steps until the next rearrangement: 90"
        )
        replica.run(1)


def _begin_to_communicate(replica: Replica, seconds: float) -> None:
    """As in calm days until a while before the others' incidents: the alerts for this wait longest."""
    replica.set_load(Poisson(2.0, mix=SHORT, seed=3))
    _communicate(replica, 0.9 * seconds, share=0.2, balance=0.9)
    _communicate(replica, 0.1 * seconds, share=0.6, balance=0.55)


def _climb(replica: Replica, seconds: float) -> None:
    """Level by level, from one client to 128."""
    levels = (1, 2, 4, 8, 16, 32, 64, 128)
    for level in levels:
        replica.set_load(ClosedLoop(level, mix=SHORT, seed=level))
        replica.run(0.8 * seconds / len(levels))
    replica.set_load(ClosedLoop(2, mix=SHORT, seed=1))


def _tell(page: str, replica: Replica, seconds: float) -> None:
    """From now on the engine's page is one that was captured from a real vLLM."""
    text = (FIXTURES / page).read_text()
    replica.server.renamed = lambda _: text


def _layout(tensor: int) -> dict[str, Any]:
    return {"model": "hy3-fp8", "tensor_parallel": tensor, "max_running_requests": 64, **_LAYOUTS[tensor]}


MEMBERS = (
    Member("hy3-0"),
    Member("hy3-latency", _slow),
    Member("hy3-errors", _fail),
    Member("hy3-memory", _leak, engine={"tensor_parallel": 8}, replica={"poll": 1.0}),
    Member("queue-0", _overload, engine={"model": "queue"}),
    Member("cache-0", _fill_cache, engine={"model": "cache", **SMALL_CACHE}),
    Member(
        "ring-0",
        partial(_communicate, share=0.6, balance=0.55),
        _begin_to_communicate,
        engine={"model": "ring"},
        replica={"log_config": _OWN_FIELDS, "mig": "4g.71gb"},
    ),
    Member(  # a plain scrape: no namespace and no pod
        "plain-0",
        partial(_tell, "metrics-c8.txt"),
        partial(_tell, "metrics-idle.txt"),
        engine={"model": "captured"},
        replica={"log": False, "gpus": False, "target_labels": {}},
    ),
    Member("unseen-0", _unseen, engine={"model": "unseen"}, replica={"log": False, "gpus": False}),
    Member("fp8-tp8", calm=_climb, engine=_layout(8)),
    Member("fp8-tp4", calm=_climb, engine=_layout(4)),
)


@dataclass(frozen=True)
class Story:
    """What happened to the fleet, as series."""

    pace: float
    replicas: list[Replica]
    recorded: dict[float, Answer]

    @property
    def quiet(self) -> float:
        """Unix time just before the incidents begin."""
        return BEGAN + CALM / self.pace

    @property
    def end(self) -> float:
        return BEGAN + (CALM + LASTS) / self.pace

    def openmetrics(self) -> Iterator[str]:
        """Every series with its times, as promtool takes it for blocks."""
        wanted = boards.sampled()
        bounds = {(name, dict(labels).get("le")) for replica in self.replicas for name, labels in told(replica.series)}
        for replica in self.replicas:
            for (name, labels), values in replica.series.items():
                text = _labels(dict(labels))
                if name not in wanted or (name, dict(labels).get("le")) not in bounds:
                    continue
                offset = BEGAN if name.endswith("_timestamp_seconds") else 0.0
                for n, value in enumerate(values):
                    if value is not None:
                        yield f"{name}{text} {value + offset!r} {BEGAN + n * replica.every:.3f}\n"
        for moment, answer in self.recorded.items():
            for labels, value in answer:
                own = {k: v for k, v in labels.items() if k not in ("series", "__name__")}
                offset = BEGAN if labels["series"].endswith("_timestamp_seconds") else 0.0
                yield f"{labels['series']}{_labels(own)} {value + offset!r} {BEGAN + moment:.3f}\n"
        yield "# EOF\n"


def play(pace: float, directory: Path, members: Iterable[Member] = MEMBERS) -> Story:
    """Let it all happen, and Prometheus' own rules be evaluated on it."""
    replicas = [member.play(pace) for member in members]
    rules = directory / "rules.yaml"
    groups = yaml.safe_load(generate("--form", "rules", "--shorten", f"{pace:g}"))["groups"]
    for group in groups:
        thin_out(group, _RULES_EVERY)  # told faster, each request stands for as many as the pace
    rules.write_text(yaml.dump({"groups": groups}))
    every, step = _RULES_EVERY / pace, _step(pace)
    moments = [n * step for n in range(1, int((CALM + LASTS) / pace / step) + 1)]
    names = "|".join(sorted(name for name in boards.names() if ":" in name or name == "ALERTS"))
    asked = f'label_replace({{__name__=~"{names}"}}, "series", "$1", "__name__", "(.*)")'
    answers = evaluate(replicas, [rules], {asked: moments}, interval=f"{every * 1000:.0f}ms")
    return Story(pace, replicas, {moment: answers[asked, moment] for moment in moments})


def _step(pace: float) -> float:
    """Seconds between two samples of what the rules recorded."""
    return (1 if pace < 5 else 2) * _RULES_EVERY / pace


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items() if value) + "}"


@contextmanager
def prometheus(story: Story, directory: Path) -> Iterator[str]:
    """The address of a Prometheus that holds *story*."""
    text, data, settings = directory / "story.om", directory / "data", directory / "prometheus.yml"
    with text.open("w") as file:
        file.writelines(story.openmetrics())
    subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", "--quiet", text, data],
        check=True,
        capture_output=True,
    )
    every = _RULES_EVERY / story.pace
    settings.write_text(f"global: {{evaluation_interval: {every * 1000:.0f}ms}}\n")
    binary = shutil.which("prometheus")
    assert binary, "prometheus is missing: apt-get install prometheus"
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            binary,
            f"--config.file={settings}",
            f"--storage.tsdb.path={data}",
            "--storage.tsdb.retention.time=50y",
            f"--query.lookback-delta={0.99 * _step(story.pace) * 1000:.0f}ms",
            f"--web.listen-address={address}",
            "--web.cors.origin=.*",
            "--log.level=error",
        ]
    )
    try:
        _wait(f"http://{address}/-/ready", process)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(20)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError(f"no Prometheus at {url}")


def ask(address: str, path: str, **parameters: str | float) -> Any:
    """The data of an answer of Prometheus' API; its error's text becomes an AssertionError."""
    body = urllib.parse.urlencode(parameters).encode()
    try:
        with urllib.request.urlopen(f"{address}/api/v1/{path}", data=body, timeout=60) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as problem:
        raise AssertionError(f"{parameters}: {json.load(problem)['error']}") from None
