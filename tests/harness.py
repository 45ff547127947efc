"""What several test modules share: a store with lines over it, a clock that is set by hand, formatting."""

from collections import Counter

from exporter import catalog, verify
from exporter.engines import profile as profiles
from exporter.engines.profile import Profile
from exporter.lifecycle import Lifecycle
from exporter.sources.lines import Lines
from exporter.store import Store


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


class Reader:
    """The log path without a file: text in, store out."""

    def __init__(self, profile: Profile | str, **options) -> None:
        self.clock = Clock()
        self.store = Store(clock=self.clock, wall=lambda: 1_700_000_000.0 + self.clock.now)
        self.lifecycle = Lifecycle(has_page=False)
        profile = profiles.bundled(profile) if isinstance(profile, str) else profile
        self.lines = Lines("log", profile, self.store, self.lifecycle, clock=self.clock, **options)

    def feed(self, text: str | bytes, *, history: bool = False) -> "Reader":
        data = text.encode() if isinstance(text, str) else text
        self.lines.feed(data if data.endswith(b"\n") else data + b"\n", history=history)
        return self

    def settle(self, seconds: float = 5.0) -> "Reader":
        """Let time pass without a further line."""
        self.clock.pass_(seconds)
        self.lines.flush()
        return self

    @property
    def errors(self) -> Counter[str]:
        series = self.store.counters.get(catalog.ERRORS, {})
        return Counter({kind: int(n) for (kind, _), n in series.items() if n})

    def told(self) -> dict[str, float]:
        """Everything known, as ``family{label=value}: number``; a histogram by its sum, without ``source``."""
        return verify.told(self.store, self.lines)
