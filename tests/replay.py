"""The simulator, the real sidecar and Prometheus' own rules, all in virtual time.

    replica = Replica("slow", EngineConfig.hy3_h20(), every=15)
    replica.set_load(Poisson(2.0))
    replica.run(600)
    replica.engine.slow(3)
    replica.run(600)
    answers = evaluate([replica], ["baseline", "latency"], {"stopline:request_latency_seconds:p99_5m": [1200]})

What promtool is given are the very series that a Prometheus would have scraped: the engine's page goes through the
ScrapeSource, its log through the LogSource, its GPUs' memory into the store, and what the sidecar's registry exposes
is kept every so many seconds.
"""

import asyncio
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families
from rules import RULES, exported, named, rules

from exporter import catalog
from exporter.config import BaselineConfig, Config, EngineConfig, GpuConfig, HistogramConfig, LogConfig, Thresholds
from exporter.sidecar import Sidecar
from exporter.signals import Reading
from exporter.simulator import Engine, Log, LogOptions, Page
from exporter.simulator import EngineConfig as Simulated
from exporter.simulator.load import Load
from exporter.sources.chunks import Chunk, TailStats, count
from exporter.sources.fetch import Unreadable
from exporter.sources.logs import LogSource
from exporter.store import gauge

LOG = "/var/log/engine.log"
ENGINE_NAMES = (
    *("vllm:e2e_request_latency_seconds_bucket", "vllm:time_to_first_token_seconds_bucket"),
    *("vllm:num_requests_waiting{", "http_requests_total"),
)
"""Beginnings of the lines of vLLM's page on which teams have alerts."""
_HISTORY = 200  # events of a log that are kept: its start-up lines among them
Labels = tuple[tuple[str, str], ...]


class Virtual:
    """Seconds that a replica lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class MemoryLog:
    """A log that is written and read in memory: a LineSource."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.stats = TailStats()
        self.paths: list[Path] = []
        self._clock = clock
        self._written: list[str] = []
        self._history: list[str] = []
        self._reopened = False

    def write(self, text: str) -> None:
        self._written.append(text)
        if len(self._history) < _HISTORY:
            self._history.append(text)

    def reopen(self, *, afresh: bool = False) -> None:
        """A new reader comes, which sees what was there before as history; or a new server writes it *afresh*."""
        if afresh:
            self._history.clear()
        self._reopened = not afresh

    def poll(self) -> Iterator[Chunk]:
        if self._reopened:
            self._reopened = False
            yield Chunk("".join(self._history).encode(), history=True)
        if self._written:
            data = "".join(self._written).encode()
            self._written.clear()
            if self.stats.readable:
                count(self.stats, data, self._clock())
                yield Chunk(data, history=False)

    def close(self) -> None: ...


class InProcess:
    """The engine's HTTP server as the sidecar asks it, without HTTP. *broken* is a reason for which it cannot be."""

    url = "http://engine"

    def __init__(self) -> None:
        self.page: Page | None = None
        self.engine: Engine | None = None
        self.broken = ""
        self.renamed: Callable[[str], str] = str  # what an upgrade made of its page

    def rendered(self) -> str:
        assert self.page is not None
        return self.renamed(self.page.render())

    async def get(self, path: str) -> tuple[str, bool]:
        if self.broken:
            raise Unreadable(self.broken)
        if self.engine is None or self.page is None or self.engine.state == "stopped":
            raise Unreadable("refused")
        if path == "/health":
            if self.engine.state == "dead":
                raise Unreadable("http_503")
            return "", False
        return self.rendered(), False


class Replica:
    """One server and the sidecar beside it. Everything happens in `run`; between two runs the engine may be broken."""

    def __init__(
        self,
        name: str,
        engine: Simulated,
        *,
        every: float = 15.0,
        poll: float = 1.0,
        seed: int = 1,
        gpus: bool = True,
        log: bool = True,
        iterations: bool = True,
        prompts: bool = False,
        scrape_engine: bool = False,
        stretch: float = 1.0,
        baseline: BaselineConfig = BaselineConfig(),  # noqa: B008  it is frozen
        thresholds: Thresholds = Thresholds(),  # noqa: B008
        log_config: LogConfig = LogConfig(),  # noqa: B008
        histograms: HistogramConfig = HistogramConfig(),  # noqa: B008
        also: frozenset[str] = frozenset(),
        mig: str = "",
        target_labels: Mapping[str, str] = {"namespace": "sim", "pod": ""},
        noise: float = 0.0,
        pace: float = 1.0,
        sampled: Callable[["Replica"], object] = lambda replica: None,
    ) -> None:
        """*also* names samples that are kept beside those that the rules name; *mig* is the GPUs' profile.

        *target_labels* are what the scrape adds beside `job` and `instance`; an empty pod is this replica's name.
        """
        self.name = name
        self.every, self.poll, self.stretch = every * stretch, poll, stretch
        self.clock = Virtual()
        self.series: dict[tuple[str, Labels], list[float | None]] = defaultdict(list)
        self.scraped = True
        """Whether Prometheus can reach the sidecar."""
        self.meanwhile: list[Callable[[], object]] = []
        """What else happens at every poll."""
        self.gpus_readable = True
        self.wall_ahead = 0.0
        """Seconds by which the time of day is off."""
        self.server = InProcess()
        self.samples = 0
        self._seed, self._gpus, self._with_log = seed, gpus, log
        self._options = LogOptions(iterations=iterations, prompts=prompts)
        self._scrape_engine = scrape_engine
        self._pace, self._sampled = pace, sampled
        self._load: Load | None = None
        self._log = MemoryLog(self.clock)
        self._config = Config(
            engine=EngineConfig(url=self.server.url),
            gpus=GpuConfig(devices="none"),
            baseline=baseline,
            thresholds=thresholds,
            log=log_config,
            histograms=histograms,
        )
        self._target = tuple(sorted((label, value or name) for label, value in target_labels.items()))
        self._names, self._mig = _wanted() | also, mig
        self._next_sample = 0.0
        self._start(engine)
        self._start_sidecar()

    # what may happen to it

    def set_load(self, load: Load | None) -> None:
        if self._load is not None:
            self._load.stop()
        self._load = load
        if load is not None:
            load.start(self.engine)

    def replace_engine(self, engine: Simulated, load: Load | None = None) -> None:
        """Stop the server and start another one in its place, set up otherwise."""
        self.set_load(None)
        self.engine.stop()
        asyncio.run(self._look())
        self._start(engine)
        self.set_load(load)

    def answer_with(self, status: int) -> None:
        """One answer of the server's that was no request to the engine."""
        self._engine_log.access("10.0.0.1:40000", "POST", "/v1/completions", status)
        if self.server.page is not None:
            self.server.page.count_http("/v1/completions", status, "POST")

    def break_stream(self) -> None:
        """One stream ends early, after its 200: only the page tells that its request failed."""
        if self.server.page is not None:
            self.server.page.count_broken()

    def log(self, line: str) -> None:
        """One more line in the server's log."""
        self._log.write(line + "\n")

    def restart_sidecar(self) -> None:
        """A new process of Stopline, which knows nothing of what was counted before, but reads the log's beginning."""
        self._log.reopen()
        self._start_sidecar()

    def unreadable_log(self) -> None:
        """From now on the file cannot be opened."""
        self._log.stats.readable, self._log.stats.reason = False, "permission"

    def run(self, seconds: float) -> None:
        """Let time pass: so many seconds, times the stretch."""
        asyncio.run(self._run(seconds * self.stretch))

    @property
    def now(self) -> float:
        return self.clock.now

    # within

    def _start_sidecar(self) -> None:
        self.sidecar = sidecar = Sidecar(
            self._config, clock=self.clock, wall=lambda: self.clock.now + self.wall_ahead, pace=self._pace
        )
        self._scrape = sidecar._build_scrape(self.server)  # its own session is for real servers
        sidecar.scrape = self._scrape
        self._logs: LogSource | None = None
        if self._with_log:
            for kind in catalog.ERROR_KINDS:
                sidecar.store.create(catalog.ERRORS, (kind,), origin="log")
            lines = sidecar._build_lines(LOG)
            self._logs = LogSource(
                self._log, lines, sidecar.store, tick=self._never, recognise=sidecar._recognise, clock=self.clock
            )

    def _start(self, engine: Simulated) -> None:
        self.engine = Engine(engine, self._seed)
        self.engine.advance(self.clock.now)
        self.server.engine = self.engine
        self.server.page = Page(self.engine)
        self._log.reopen(afresh=True)
        self._engine_log = Log(self.engine, self._log.write, self._options)

    async def _run(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end - 1e-9:
            if self.clock.now >= self._next_sample - 1e-9:
                self._sample()
                self._next_sample += self.every
            self.clock.now = min(end, self.clock.now + self.poll)
            self.engine.advance(self.clock.now)
            await self._look()

    async def _look(self) -> None:
        """What the sidecar's sources do in one turn."""
        if self._logs is not None:
            await self._logs.once()
        await self._scrape.once()
        for each in self.meanwhile:
            each()
        if self._gpus:
            self._publish_gpus()
            self.sidecar.headroom.look()
        self.sidecar.history.look()

    def _publish_gpus(self) -> None:
        config, used = self.engine.config, float(self.engine.gpu_memory_used_bytes)
        samples = []
        for index in range(config.gpus):
            labels = (str(index), f"GPU-{self.name}-{index}")
            samples += [
                gauge(catalog.GPU_TOTAL, config.gpu_memory_bytes, *labels),
                gauge(catalog.GPU_USED, used, *labels),
                gauge(catalog.GPU_PEAK, used, *labels),
                gauge(catalog.GPU_HEADROOM, config.gpu_memory_bytes - used, *labels),
                gauge(catalog.GPU_UTILIZATION, float(self.engine.running > 0), *labels),
                gauge(catalog.GPU_UP, 1.0, *labels),
                gauge(catalog.GPU_INFO, 1.0, *labels, "simulated H20", "", self._mig),
            ]
        if self.gpus_readable:
            reading = Reading("gpu", "gpu", ok=True, at=self.clock.now, samples=tuple(samples))
        else:
            reading = Reading("gpu", "gpu", ok=False, at=self.clock.now, samples=(), reason="driver_not_loaded")
        self.sidecar.store.publish(reading)

    def _sample(self) -> None:
        """What a scrape of the sidecar's page would have given at this moment."""
        wanted = self._names
        own: Labels = (
            ("instance", f"{self.name}:10777"),
            ("job", "stopline"),
            *self._target,
        )
        now: dict[tuple[str, Labels], float] = {("up", own): float(self.scraped)}
        if self.scraped:
            for family in self.sidecar.registry.collect():
                for sample in family.samples:
                    if sample.name in wanted:
                        now[sample.name, (*own, *sorted(sample.labels.items()))] = sample.value
        if self._scrape_engine:
            now |= self._engine_samples(own)
        for key, value in now.items():
            values = self.series[key]
            values.extend([None] * (self.samples - len(values)))
            values.append(value)
        self.samples += 1
        self._sampled(self)

    def _engine_samples(self, own: Labels) -> dict[tuple[str, Labels], float]:
        """What a Prometheus has that scrapes the engine itself, and a dcgm-exporter: those names that USUAL asks for."""
        own = (*own[:1], ("job", "vllm"), *own[2:])
        answers = not self.server.broken and self.engine.state != "stopped"
        now: dict[tuple[str, Labels], float] = {("up", own): float(answers)}
        if answers:
            page = self.server.rendered()
            text = "\n".join(line for line in page.splitlines() if line.startswith(ENGINE_NAMES))
            for family in text_string_to_metric_families(text + "\n"):
                for sample in family.samples:
                    now[sample.name, (*own, *sorted(sample.labels.items()))] = sample.value
        if self._gpus and self.gpus_readable:
            used, total = self.engine.gpu_memory_used_bytes / 2**20, self.engine.config.gpu_memory_bytes / 2**20
            for index in range(self.engine.config.gpus):
                labels = (*own[:1], ("job", "dcgm"), *own[2:], ("gpu", str(index)))
                now["DCGM_FI_DEV_FB_USED", labels] = used
                now["DCGM_FI_DEV_FB_FREE", labels] = total - used
        return now

    @staticmethod
    async def _never() -> None: ...


def _wanted() -> set[str]:
    if not _WANTED:
        _WANTED.update(exported() & {name for rule in rules() for name in named(str(rule))})
    return _WANTED


_WANTED: set[str] = set()


# what Prometheus makes of it


def inputs(replicas: Iterable[Replica]) -> Iterator[tuple[str, str]]:
    """Series and values as promtool's tests have them, without buckets that tell nothing of any replica of the model."""
    replicas = list(replicas)
    bounds = {_bound(key) for replica in replicas for key in told(replica.series)}
    for replica in replicas:
        for (name, labels), values in replica.series.items():
            if _bound((name, labels)) not in bounds:
                continue
            padded = values + [None] * (replica.samples - len(values))
            text = ",".join(f'{label}="{value}"' for label, value in labels)
            yield f"{name}{{{text}}}", _values(padded)


def _bound(key: tuple[str, Labels]) -> tuple[str, str, str]:
    name, labels = key[0], dict(key[1])
    return (name, labels.get("model", ""), labels["le"]) if name.endswith("_bucket") else ("", "", "")


def told(series: Mapping[tuple[str, Labels], list[float | None]]) -> dict[tuple[str, Labels], list[float | None]]:
    """Without the empty buckets below all observations, but the last, and the full ones above, but the first."""
    kept = {key: values for key, values in series.items() if not key[0].endswith("_bucket")}
    histograms: dict[tuple[str, Labels], list[tuple[float, Labels, list[float | None]]]] = defaultdict(list)
    for (name, labels), values in series.items():
        if name.endswith("_bucket"):
            bound = float(dict(labels)["le"])
            histograms[name, tuple(p for p in labels if p[0] != "le")].append((bound, labels, values))
    for (name, _), buckets in histograms.items():
        buckets.sort(key=lambda bucket: bucket[0])
        top = buckets[-1][2]
        empty = [not any(values) for _, _, values in buckets]
        full = [values == top for _, _, values in buckets]
        for n, (_, labels, values) in enumerate(buckets):
            last = n == len(buckets) - 1
            if last or not ((empty[n] and empty[n + 1]) or (full[n] and n and full[n - 1])):
                kept[name, labels] = values
    return kept


def _values(values: Sequence[float | None]) -> str:
    """In promtool's notation: runs of equal steps, gaps, and a stale marker where a gap begins."""
    parts: list[str] = []
    at = 0
    while at < len(values):
        first = values[at]
        if first is None:
            end = next((n for n in range(at, len(values)) if values[n] is not None), len(values))
            gap = end - at
            if at:
                parts.append("stale")
                gap -= 1
            if gap:
                parts.append(f"_x{gap}" if gap > 1 else "_")
            at = end
            continue
        step = values[at + 1] - first if at + 1 < len(values) and values[at + 1] is not None else None
        end = at + 1
        while (
            step is not None and end < len(values) and values[end] is not None and values[end] - values[end - 1] == step
        ):
            end += 1
        steps = end - at - 1
        if step is None or steps < 2 or (step and not float(step).is_integer()):
            parts.append(repr(float(first)))
            at += 1
        else:
            parts.append(f"{float(first)!r}{step:+.0f}x{steps}" if step else f"{float(first)!r}x{steps}")
            at = end
    return " ".join(parts)


Answer = list[tuple[dict[str, str], float]]


def thin_out(group: dict[str, Any], every: float) -> None:
    """promtool evaluates a *group* *every* so many seconds, whatever its interval: increases that are added up later
    would count many times."""
    if group["name"] == "stopline-increases":
        for rule in group["rules"]:
            rule["expr"] = f"({rule['expr']}) * {every:g} / {_seconds(group['interval']):g}"


def evaluate(
    replicas: Sequence[Replica],
    files: Iterable[str | Path],
    questions: Mapping[str, Iterable[float]],
    *,
    interval: str = "30s",
) -> dict[tuple[str, float], Answer]:
    """What each query gives at each of its moments (seconds), after Prometheus has evaluated the rules until then.

    *files* are names within deploy/rules, or paths.
    """
    every = replicas[0].every
    test = {
        "rule_files": [str(f if isinstance(f, Path) else RULES / f"{f}.yaml") for f in files],
        "evaluation_interval": interval,
        "tests": [
            {
                "interval": f"{every * 1000:.0f}ms",
                "input_series": [{"series": series, "values": values} for series, values in inputs(replicas)],
                "promql_expr_test": [
                    {"expr": query, "eval_time": f"{moment * 1000:.0f}ms"}
                    for query, moments in questions.items()
                    for moment in moments
                ],
            }
        ],
    }
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "test.yaml"
        file.write_text(yaml.dump(test, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), width=1 << 30))
        done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    answers: dict[tuple[str, float], Answer] = {(q, m): [] for q, moments in questions.items() for m in moments}
    text = done.stdout + done.stderr
    pattern = r'(?m)^\s*expr: ("(?:[^"\\]|\\.)*"), time: (\w+),\s*\n\s*exp: ?(?:nil)?\s*\n\s*got: ?(.*)$'
    for match in re.finditer(pattern, text):
        key = yaml.safe_load(match[1]), _seconds(match[2])
        answers[key] = [(_labels(labels), float(value)) for labels, value in _SAMPLE.findall(match[3])]
    if re.search(r"(?m), err: |^promtool: error|unmarshal|parse error", text):
        raise AssertionError(text[:2000])
    return answers


_SAMPLE = re.compile(r"(?:[\w:]+)?(\{[^}]*\})? ?([-+]?(?:\d[\d.]*(?:E[-+]\d+)?|NaN|Inf))(?=, |$)")


def _labels(text: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', text))


def _seconds(text: str) -> float:
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
    return round(sum(int(n) * units[unit] for n, unit in re.findall(r"(\d+)(ms|[smhdw])", text)), 3)
