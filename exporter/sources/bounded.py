"""Matching a regex for a bounded time: what strangers write must not hold up everything else.

Python's own engine has no limit, but lets signals through while it matches, and a timer makes one: of processor time,
for a machine that is busy elsewhere makes no regex slow. That works in the main thread only, which is where logs are
read; elsewhere nothing is bounded.
"""

import re
import signal
import threading
from collections.abc import Callable

LIMIT_SECONDS = 0.1
_REST_SECONDS = 10.0
"""How long a regex is not tried again after that, so that it costs a hundredth of the time at most."""


class TooSlow(Exception):
    """The regex was given up, or rests from having been."""


class Bounded:
    """The regexes of one log; each that was too slow rests for a while. *clock* gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._resting: dict[re.Pattern[str], float] = {}

    def match(self, regex: re.Pattern[str], text: str) -> re.Match[str] | None:
        """As regex.match. Raises TooSlow."""
        if (until := self._resting.get(regex)) is not None:
            if self._clock() < until:
                raise TooSlow
            del self._resting[regex]
        if threading.current_thread() is not threading.main_thread():
            return regex.match(text)
        before = signal.signal(signal.SIGVTALRM, _give_up)
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_SECONDS)
            try:
                return regex.match(text)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        except TooSlow:
            self._resting[regex] = self._clock() + _REST_SECONDS
            raise
        finally:
            signal.signal(signal.SIGVTALRM, before)


def _give_up(*_: object) -> None:
    raise TooSlow
