"""What the engine is and which phase of its life it is in, from what the log, the page and /health say."""

import hashlib
import re

from exporter import catalog
from exporter.catalog import PHASES
from exporter.signals import Gauges, Sample

LABEL = re.compile(r"[\w./:@+ -]{1,64}")
"""What may become the value of a label."""
_ALIVE_AFTER = 20
_SAME_START_SECONDS = 2.0
_INFO = ("version", "model", "dtype", "quantization")


class Lifecycle:
    """Phase, start time and identity of the one engine this sidecar watches.

    *has_page* says that a metrics endpoint is configured: the engine is then up only while it answers. One that is not
    *watched* at all, where only GPUs are read, has no phase, and nothing is told of it.
    """

    def __init__(self, *, has_page: bool, watched: bool = True) -> None:
        self.watched = watched
        self.phase = "starting" if watched else ""
        self.engine = ""
        self.info: dict[str, str] = {}
        self.started_at: float | None = None
        self.lives = 0
        """Starts seen so far: what was true in one life says nothing about the next."""
        self.voided = 0
        """How often what was known turned out to be of another process, with no word of its start in a log."""
        self._has_page = has_page
        self._answers = False
        self._begun = False
        self._recalled_start: float | None = None
        self._gone = False
        self._revived = 0
        self._identity: dict[str, str] = {}

    @property
    def up(self) -> bool:
        """Whether it serves; for all that is known, where it is not watched."""
        serves = self.phase in ("serving", "stopping") and (self._answers or not self._has_page)
        return serves or not self.watched

    def tell(self, label: str, text: str | None) -> None:
        """Something of its identity, as the log or an info metric says; nothing that cannot be a label."""
        if text and text.lower() != "none" and LABEL.fullmatch(text):
            self.info[label] = text

    def recall(self, info: dict[str, str], started_at: float | None) -> None:
        """What was known before this sidecar was restarted; it holds until a log or a page tells another start."""
        self.info = info | self.info
        self.started_at = self._recalled_start = started_at

    # what the log says

    def begin(self, at: float | None) -> None:
        """The engine was started (Unix time *at*, None if that is not known): nothing said before holds."""
        self.phase, self._gone, self._revived = "starting", False, 0
        self.started_at = at
        self.lives += 1
        self._begun, self._recalled_start = True, None
        self._forget()

    def enter(self, phase: str) -> None:
        """The log told a phase."""
        if phase not in PHASES:
            raise ValueError(f"no phase {phase!r}")
        if self.phase == "dead" and phase not in ("stopping", "dead"):
            self.lives += 1  # it goes on, so it was started: a start line need not be there
        self.phase = phase

    def worked(self, times: int = 1, *, finished: bool = True) -> None:
        """A request or a step was seen: whatever was missed, the engine serves.

        An engine without a page that was said to be dead lives after some finished work: more than what was under
        way when it died.
        """
        if self.phase in ("starting", "loading", "warming"):
            self.phase = "serving"
        elif self.phase == "dead" and finished and not self._has_page:
            self._revived += times
            if self._revived >= _ALIVE_AFTER:
                self._revive()

    # what the endpoint says

    def answered(self, *, healthy: bool | None, moved: bool, started_at: float | None, restarted: bool = False) -> None:
        """The page was read. *healthy* is what /health said, None if it was not asked.

        *moved* says that a counter grew since the last page: proof of life where /health is not to be had.
        *restarted* says that the page is that of another process than the last one was.
        """
        self._gone |= restarted
        if started_at is not None:
            other = self._recalled_start is not None and abs(started_at - self._recalled_start) > _SAME_START_SECONDS
            if other or (restarted and not self._begun):
                self._forget()
                self.voided += 1
            self.started_at, self._recalled_start = started_at, None
        self._begun = False
        if healthy is False:
            self._answers = False
            if self.phase == "serving":
                self.phase = "dead"
            return
        self._answers = True
        alive = healthy is True or moved
        if self._gone or (self.phase == "dead" and alive):
            self._revive()
        elif self.phase in ("starting", "loading", "warming"):
            self.phase = "serving"

    def silent(self, *, refused: bool) -> None:
        """The page could not be read; *refused* means that nobody listens any more."""
        was = self._answers
        self._answers = False
        if refused:
            self._gone = True
            if was and self.phase == "serving":
                self.phase = "dead"

    def _revive(self) -> None:
        self.lives += 1
        self.phase, self._gone, self._revived = "serving", False, 0

    def _forget(self) -> None:
        self.info = {name: text for name, text in self.info.items() if name == "model"}  # until another is told
        self._identity.clear()

    # what it is

    def samples(self, gauges: Gauges) -> list[Sample]:
        """The engine's own gauges; *gauges* are all others known now, part of what identifies it."""
        if not self.watched:
            return []
        samples = [Sample(catalog.ENGINE_UP, (), float(self.up))]
        samples += [Sample(catalog.ENGINE_PHASE, (p,), float(p == self.phase)) for p in PHASES]
        if self.started_at is not None:
            samples.append(Sample(catalog.ENGINE_START, (), self.started_at))
        if self.engine:
            info = {name: self.info.get(name, "") for name in _INFO}
            info |= {"engine": self.engine, "config": self.config(gauges)}
            labels = tuple(info[name] for name in catalog.ENGINE_INFO.labels)
            samples.append(Sample(catalog.ENGINE_INFO, labels, 1.0))
        return samples

    def config(self, gauges: Gauges) -> str:
        """Eight hex digits for what makes two runs comparable; the same parts always give the same digits.

        Parts once known are kept until the next start, so that a lost GPU does not make another run of it.
        """
        known = {name: self.info[name] for name in _INFO if self.info.get(name)}
        for (dimension,), value in gauges.get(catalog.PARALLELISM, {}).items():
            known[dimension] = f"{value:g}"
        for (name,), value in gauges.get(catalog.ENGINE_LIMIT, {}).items():
            if name in ("max_running_requests", "max_model_len"):
                known[name] = f"{value:g}"
        if names := {labels[2] for labels in gauges.get(catalog.GPU_INFO, {})}:
            known["gpu"] = " ".join(sorted(names))
        self._identity |= known
        parts = "\n".join(f"{k}={v}" for k, v in sorted(({"engine": self.engine} | self._identity).items()))
        return hashlib.sha256(parts.encode()).hexdigest()[:8]
