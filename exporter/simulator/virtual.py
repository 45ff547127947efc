"""A run in virtual time: as fast as the CPU allows, with a page at every poll."""

import math
from collections.abc import Callable, Sequence

from .engine import Engine
from .load import Load
from .metrics import REQUEST_BOUNDS, Page
from .truth import Truth

EPOCH = 1_796_023_551.0  # Unix time of the clock's 0; any would do


def simulate(
    engine: Engine,
    load: Load,
    seconds: float,
    *,
    every: float = 1.0,
    on_poll: Callable[[float, str], object] | None = None,
    request_bounds: Sequence[float] = REQUEST_BOUNDS,
) -> Truth:
    """Put *load* on *engine* for so many seconds of its clock; gives what really happened.

    *on_poll* is called with the moment and the text of /metrics, at the start and then *every* so many
    seconds: what a scraper of this server would have seen.  The page counts from here on.  At the end the
    load is stopped, and what is then in flight stays there (`engine.advance` lets it finish).
    """
    truth, page = Truth(engine), Page(engine, EPOCH, request_bounds)
    began = engine.now
    load.start(engine)
    for poll in range(math.floor(seconds / every * (1 + 1e-12)) + 1):
        moment = began + every * poll
        engine.advance(moment)
        if on_poll is not None:
            on_poll(moment, page.render())
    engine.advance(max(engine.now, began + seconds))
    load.stop()
    return truth
