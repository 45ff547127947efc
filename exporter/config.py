"""The settings: typed, strict, all defaults in one place. Flags stand above environment above file above default."""

import importlib.util
import ipaddress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from exporter import baseline, strictyaml
from exporter.baseline import Pin
from exporter.engines import profile as profiles
from exporter.engines.profile import Pattern, Profile, Signal
from exporter.strictyaml import ConfigError, Seconds, Size

DEFAULT_PORT = 10777
_GPU_WORDS = ("auto", "all", "none")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and " " not in url
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which server is watched."""

    name: str = "auto"
    """Engine by name; auto finds out from the metrics page or the log."""
    url: str = ""
    """Base address of the server, such as http://127.0.0.1:8000; empty for a server without metrics."""
    model: str = ""
    """Value of the model label; empty takes what the engine says."""
    profile: Path | None = None
    """A profile of your own, in place of those that ship."""

    def __post_init__(self) -> None:
        if self.name != "auto" and self.name not in profiles.names():
            raise ValueError(f"name must be auto or one of {', '.join(profiles.names())}, got {self.name!r}")
        if self.url and not _is_address(self.url):
            raise ValueError(f"url must start with http:// or https:// and name a host, got {self.url!r}")
        if "@" in urlsplit(self.url).netloc:
            raise ValueError("url must hold no user or password: give scrape.username and scrape.password_file")
        if self.url.rstrip("/").endswith("/metrics"):
            raise ValueError(f"url must be the server's base address, without /metrics, got {self.url!r}")
        if self.profile is not None and self.name != "auto":
            raise ValueError("profile excludes name: a profile names its engine itself")


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Where the server's log is and what is in it beside what the profile knows."""

    paths: tuple[str, ...] = ()
    """Files, patterns such as /var/log/pods/*/*.log, - for standard input, or kube:// for the Kubernetes API."""
    fields: dict[str, Signal | tuple[Signal, ...]] = field(default_factory=dict)
    """Fields of your own server's lines: name to signal, unit and labels."""
    patterns: tuple[Pattern, ...] = ()
    """Patterns of your own, as in a profile."""
    collapse: Seconds = Seconds(10.0)
    """Errors of one kind within this time are one event."""
    interval: Seconds = Seconds(0.1)
    """How often the log is looked at."""

    def __post_init__(self) -> None:
        if not 0.01 <= self.interval <= 60:
            raise ValueError("interval must be from 10ms to 60s")
        begun, ended = ({getattr(p, name) for p in self.patterns} - {""} for name in ("begin", "end"))
        if odd := begun ^ ended:
            raise ValueError(
                f"patterns must name the id alike in begin and end; {', '.join(sorted(odd))} has no partner"
            )


@dataclass(frozen=True, slots=True)
class ScrapeConfig:
    """How the engine's metrics are fetched."""

    interval: Seconds = Seconds(1.0)
    """How often the engine's page is fetched."""
    timeout: Seconds | None = None
    """Longest wait for an answer; empty is nine tenths of the interval."""
    max_bytes: Size = Size(16 << 20)
    """Largest page that is read."""
    bearer_token_file: Path | None = None
    """File with a token sent to the engine; read anew at each request."""
    username: str = ""
    """User for basic authentication."""
    password_file: Path | None = None
    """File with the password for basic authentication."""
    ca_file: Path | None = None
    """Certificates trusted beside the system's, for an engine behind https."""
    insecure_skip_verify: bool = False
    """Accept any certificate of the engine."""
    iterations: bool = False
    """Also read the records of iterations (TensorRT-LLM); what is read is gone for any other reader."""

    def __post_init__(self) -> None:
        if not 0.1 <= self.interval <= 300:
            raise ValueError("interval must be from 100ms to 5m")
        if self.timeout is not None and not 0 < self.timeout <= self.interval:
            raise ValueError("timeout must be above 0 and not above interval, or polls would overlap")
        if bool(self.username) != (self.password_file is not None):
            raise ValueError("username and password_file go together")
        if self.username and self.bearer_token_file is not None:
            raise ValueError("bearer_token_file excludes username: give one of the two")
        if self.max_bytes < 1024:
            raise ValueError("max_bytes must be at least 1KiB")

    @property
    def deadline(self) -> float:
        """Seconds to wait for an answer."""
        return self.timeout if self.timeout is not None else 0.9 * self.interval


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """Which GPUs are read."""

    devices: str | tuple[str, ...] = "auto"
    """auto (those of the engine, else all that can be seen), all, none, or a list of indices and UUIDs."""
    interval: Seconds = Seconds(1.0)
    """How often the GPUs are read."""

    def __post_init__(self) -> None:
        if isinstance(self.devices, str):
            if self.devices not in _GPU_WORDS:
                raise ValueError(f"devices must be auto, all, none or a list, got {self.devices!r}")
        elif not self.devices or set(self.devices) & {"", *_GPU_WORDS}:
            raise ValueError(f"devices must list indices and UUIDs, got {', '.join(self.devices) or 'nothing'}")
        if not 0.1 <= self.interval <= 60:
            raise ValueError("interval must be from 100ms to 60s")


def _host_port(address: str) -> tuple[str | None, int]:
    """Host, None for all addresses, and port of a listen_address. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"listen_address must be [HOST]:PORT, got {address!r}")
    if host.startswith("["):
        host = host.strip("[]")
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"listen_address must have an IPv6 address in its brackets, got [{host}]") from None
    elif ":" in host:
        raise ValueError(f"listen_address must have an IPv6 host in brackets: [{host}]:{port}")
    return host or None, int(port)


@dataclass(frozen=True, slots=True)
class WebConfig:
    """Where Stopline itself answers."""

    listen_address: str = f":{DEFAULT_PORT}"
    """[HOST]:PORT; without a host all addresses, IPv4 and IPv6."""
    config_file: Path | None = None
    """File with TLS and passwords, in the format of Prometheus' exporter-toolkit; read again when it changes."""

    def __post_init__(self) -> None:
        self.host_port()

    def host_port(self) -> tuple[str | None, int]:
        """Host, None for all addresses, and port. Raises ValueError."""
        return _host_port(self.listen_address)


@dataclass(frozen=True, slots=True)
class TracesConfig:
    """Whether the engine's spans are taken in, by OTLP over HTTP at /v1/traces."""

    listen_address: str = ""
    """[HOST]:PORT for the engine to send its spans to, such as 127.0.0.1:4318; empty takes in none."""
    max_bytes: Size = Size(4 << 20)
    """Largest batch of spans that is taken in, unpacked."""

    def __post_init__(self) -> None:
        if self.max_bytes < 1024:
            raise ValueError("max_bytes must be at least 1KiB")
        if self.listen_address:
            self.host_port()
            if importlib.util.find_spec("opentelemetry") is None:
                raise ValueError("listen_address needs the extra traces: pip install 'stopline-exporter[traces]'")

    def host_port(self) -> tuple[str | None, int]:
        """Host, None for all addresses, and port. Raises ValueError."""
        return _host_port(self.listen_address)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The stop lines' thresholds, exported for the alert rules to compare with."""

    latency_ratio: float = 2.0
    """P99 over its baseline at which the latency line trips."""
    latency_warning_ratio: float = 1.5
    """P99 over its baseline at which a warning says that it rises."""
    latency_floor_seconds: float = 0.05
    """P99 must exceed its baseline by at least this much, so that a doubling of nothing wakes nobody."""
    min_requests: float = 20.0
    """Requests in the window below which latency and error ratio are not judged."""
    min_errors: float = 3.0
    """Failed requests in the window below which the error ratio is not judged: one of twenty is no outage."""
    error_ratio: float = 0.05
    """Errors over requests at which the error line trips."""
    memory_used_ratio: float = 0.90
    """Use of a GPU's memory at which the memory line trips, for engines that do not pre-allocate."""
    memory_headroom_bytes: Size = Size(1 << 30)
    """Free memory of a GPU below which the memory line trips."""
    memory_growth_bytes: Size = Size(1 << 30)
    """Growth above the resting use at which the memory line trips, for engines that pre-allocate."""
    kv_cache_usage_ratio: float = 0.95
    """KV cache use that counts as full, if requests also wait or are preempted."""
    expert_balance_ratio: float = 0.7
    """Balance of the experts below which they count as uneven."""
    communication_ratio: float = 0.5
    """Share of the step spent communicating above which a server counts as bound by it."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        for name in ("error_ratio", "memory_used_ratio", "kv_cache_usage_ratio"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be a ratio from 0 to 1, got {getattr(self, name):g}")
        for name in ("latency_ratio", "latency_warning_ratio"):
            if getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 1: it is a multiple of the baseline")


@dataclass(frozen=True, slots=True)
class BaselineConfig:
    """What the latency line compares with, where that is not to be learned."""

    pins: tuple[Pin, ...] = ()
    """Pinned quantiles; these stand above those in the files."""
    files: tuple[Path, ...] = ()
    """Files with pins, the same list under the key pins."""

    def __post_init__(self) -> None:
        baseline.check_unique(self.pins)


@dataclass(frozen=True, slots=True)
class HistogramConfig:
    """How fine the histograms are."""

    factor: float = 1.15
    """Each bound is about this many times the one before; larger means fewer series and a coarser P99."""

    def __post_init__(self) -> None:
        if not 1.05 <= self.factor <= 4:
            raise ValueError("factor must be from 1.05 to 4")


@dataclass(frozen=True, slots=True)
class LabelConfig:
    """Bounds for label values that come from outside."""

    max_values: int = 64
    """Values one label of one family may have; further ones become other and are counted."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_values <= 10_000:
            raise ValueError("max_values must be from 1 to 10000")


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """Stopline's own log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is written."""
    format: Literal["text", "json"] = "text"
    """One line of text or one JSON object for each record."""

    def __post_init__(self) -> None:
        for name, choices in (("level", ("debug", "info", "warning", "error")), ("format", ("text", "json"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be set. Sections and keys are those of the file."""

    engine: EngineConfig = EngineConfig()
    log: LogConfig = LogConfig()
    scrape: ScrapeConfig = ScrapeConfig()
    gpus: GpuConfig = GpuConfig()
    traces: TracesConfig = TracesConfig()
    web: WebConfig = WebConfig()
    thresholds: Thresholds = Thresholds()
    baseline: BaselineConfig = BaselineConfig()
    histograms: HistogramConfig = HistogramConfig()
    labels: LabelConfig = LabelConfig()
    logging: LoggingConfig = LoggingConfig()
    state_dir: Path | None = None
    """Directory for what must survive a restart (place in the log, facts of the engine); empty keeps nothing."""

    def profile(self) -> Profile | None:
        """The profile that is asked for; None means find out. Raises ConfigError for a profile file."""
        if self.engine.profile is not None:
            if not self.engine.profile.is_file():
                raise ConfigError([f"engine.profile: {self.engine.profile}: no such file"])
            return profiles.load(self.engine.profile)
        return None if self.engine.name == "auto" else profiles.bundled(self.engine.name)

    def pins(self) -> tuple[Pin, ...]:
        """All pinned baselines, the most important first. Raises ConfigError for a file of them."""
        found = self.baseline.pins
        for path in self.baseline.files:
            found += strictyaml.load(path, baseline.Pins).pins
        return found

    def warnings(self) -> list[str]:
        """What is allowed and yet probably not meant."""
        found = []
        if not self.engine.url and not self.log.paths:
            found.append("no engine is watched, only GPUs: neither engine.url nor log.paths is set")
        found += [
            f"log.patterns: {pattern.name}: the regex holds no certain text of three characters, "
            "so it is tried on every line; add 'contains'"
            for pattern in self.log.patterns
            if not pattern.literals
        ]
        if self.state_dir is None and self.log.paths:
            found.append("state_dir is not set: lines written while Stopline restarts are not counted")
        return found


def load(path: Path | None, overrides: dict[str, dict[str, Any]] | None = None) -> Config:
    """The settings of the file at *path*, all defaults without one, with *overrides* by section on top.

    Raises ConfigError with every problem, each as file:line: key: problem.
    """
    config = strictyaml.load(path, Config) if path is not None else Config()
    if path is not None and config.engine.profile is not None:  # a relative path is beside the settings
        config = replace(config, engine=replace(config.engine, profile=path.parent / config.engine.profile))
    if path is not None:
        files = tuple(path.parent / file for file in config.baseline.files)
        config = replace(config, baseline=replace(config.baseline, files=files))
    if path is not None and config.web.config_file is not None:
        config = replace(config, web=replace(config.web, config_file=path.parent / config.web.config_file))
    problems = []
    for section, values in (overrides or {}).items():
        try:
            if section:
                values = {section: replace(getattr(config, section), **values)}
            config = replace(config, **values)
        except ValueError as error:
            problems.append(f"{section}.{error}")
    if problems:
        raise ConfigError(problems)
    config.profile()
    config.pins()
    return config
