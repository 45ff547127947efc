"""Pinned baselines: quantiles that hold as the baseline in place of those that the recording rules learn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from exporter import catalog
from exporter.lifecycle import Lifecycle
from exporter.signals import Gauges, Labels, Sample
from exporter.strictyaml import Seconds


@dataclass(frozen=True, slots=True)
class Pin:
    """One quantile of a calm engine, as a load test found it or as somebody decided."""

    signal: Literal["request", "time_to_first_token", "queue_wait", "step"]
    """What it is of: a request's whole latency, a part of it, or a step of the engine."""
    quantile: float
    """Above 0 and below 1, such as 0.99."""
    seconds: Seconds
    """How long that is."""
    model: str = ""
    """Model it holds for; empty for the one that is served."""
    config: str = ""
    """Config of stopline_engine_info it holds for, so that it goes when the engine is set up otherwise; empty: any."""

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise ValueError(f"quantile must be above 0 and below 1, got {self.quantile:g}")
        if not self.seconds > 0:
            raise ValueError("seconds must be above 0")


@dataclass(frozen=True, slots=True)
class Pins:
    """A file of pins."""

    pins: tuple[Pin, ...]

    def __post_init__(self) -> None:
        check_unique(self.pins)


def check_unique(pins: Sequence[Pin]) -> None:
    """Raises ValueError if two pins are for the same quantile of the same run."""
    seen = set[tuple[str, str, str, float]]()
    for index, pin in enumerate(pins):
        key = (pin.model, pin.config, pin.signal, pin.quantile)
        if key in seen:
            raise ValueError(f"pins[{index}] pins quantile {pin.quantile:g} of {pin.signal} a second time")
        seen.add(key)


def samples(pins: Sequence[Pin], engine: Lifecycle, gauges: Gauges, model: str) -> Iterator[Sample]:
    """The pins that hold for *engine* as it is; of several for one quantile the first. *gauges* identify it.

    *model* is the value of the model label, empty to take what the engine says.
    """
    served, config = model or engine.info.get("model", ""), engine.config(gauges)
    told = set[Labels]()
    for pin in pins:
        labels = (pin.model or served, pin.signal, f"{pin.quantile:g}")
        if pin.config in ("", config) and labels not in told:
            told.add(labels)
            yield Sample(catalog.BASELINE, labels, pin.seconds)
