"""Failed requests of which no error tells, such as a stream that ends early after its 200: each is an error itself."""

import math
from collections import deque
from collections.abc import Callable, Iterator

from exporter.lifecycle import Lifecycle
from exporter.signals import Origin

WAIT_SECONDS = 10.0
"""So much later than a page tells that a request failed, something may tell why."""


class Untold:
    """Holds failed requests back until it is sure that no error tells them.

    An error tells what fails within WAIT_SECONDS before it, and within *before* seconds after it: so long may a page
    be late, and so long is a further error of the same kind the same event. What fails while the engine stops or dies
    is told by that. *clock* gives seconds.
    """

    def __init__(self, lifecycle: Lifecycle, clock: Callable[[], float], *, before: Callable[[], float]) -> None:
        self._lifecycle = lifecycle
        self._clock = clock
        self._before = before
        self._told_at = -math.inf
        self._held: deque[tuple[float, Origin, float]] = deque()

    @property
    def planned(self) -> bool:
        """Whether the engine is being stopped: it ends its requests on purpose."""
        return self._lifecycle.phase == "stopping"

    def told(self) -> None:
        """An error of the engine was told just now."""
        self._told_at = self._clock()
        self._held.clear()

    def failed(self, requests: float, origin: Origin) -> None:
        """So many requests have failed since the last look, as *origin* tells."""
        now = self._clock()
        if now - self._told_at > self._before():
            self._held.append((now, origin, requests))

    def due(self) -> Iterator[tuple[Origin, float]]:
        """Requests of which it is sure now, by who told that they failed."""
        if self._lifecycle.phase != "serving":
            self._held.clear()
        while self._held and self._clock() - self._held[0][0] >= WAIT_SECONDS:
            _, origin, requests = self._held.popleft()
            yield origin, requests
