"""The words between a source and the store: a sample, a reading, where a signal came from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from exporter.catalog import Family

Origin = Literal["trace", "log", "metrics", "gpu"]
"""What kind of source a signal came from; the value of the ``source`` label."""

Labels = tuple[str, ...]
"""Label values in the order of the family's labels."""

Gauges = Mapping[Family, Mapping[Labels, float]]
"""What gauges say now."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One number in base units, for one gauge and its label values."""

    family: Family
    labels: Labels
    value: float

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.family.labels):
            raise ValueError(f"{self.family.name} wants labels {self.family.labels}, got {self.labels}")


@dataclass(frozen=True, slots=True)
class Reading:
    """The outcome of one attempt to read a source; replaces that source's last one whole.

    A reading that failed has ok=False, a *reason* from a closed set and no samples; *detail* is more on it in free
    words, for people only. *seconds* is how long the attempt took, *at* the Unix time at which it ended.
    """

    source: str
    origin: Origin
    ok: bool
    at: float
    samples: tuple[Sample, ...] = ()
    reason: str = ""
    seconds: float = 0.0
    detail: str = ""

    def __post_init__(self) -> None:
        if not self.ok and (self.samples or not self.reason):
            raise ValueError(f"a failed reading of {self.source} has a reason and no samples")
