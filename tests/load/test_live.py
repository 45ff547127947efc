"""How it goes, on a terminal and elsewhere."""

import io
import math

from harness import Clock
from measured import level, requests

from exporter.load.client import Progress
from exporter.load.live import Live


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def story(out: io.StringIO) -> str:
    clock = Clock()
    live = Live(out, clock)
    live.say("warm-up")
    live.progress(2, Progress(4, requests([1.0, 1.0])), 1.0)
    clock.pass_(11.0)
    live.progress(2, Progress(4, requests([1.0, 1.0, 1.0]), errors=1), 2.0)
    first = level(1, [1.0] * 60)
    live.level(first, first)
    live.level(level(2, [2.0] * 60), first)
    live.level(level(4, [2.0] * 50 + [math.inf] * 10), first)
    return out.getvalue()


LEVELS = (
    "concurrency 1: P50 1.00 s, P99 1.00 s, 1.00 req/s, 10.0 tok/s, errors 0\n"
    "concurrency 2: P50 2.00 s, P99 2.00 s, 2.00x, 0.50 req/s, 5.0 tok/s, errors 0\n"
    "concurrency 4: P50 2.00 s, P99 failed, 0.45 req/s, 4.5 tok/s, errors 10 timeout\n"
)


def test_plain_lines_are_few() -> None:
    assert story(io.StringIO()) == (f"warm-up\nconcurrency 2: 3 of 4, 1.5 req/s, P99 1.00 s, errors 1\n{LEVELS}")


def test_a_terminal_has_one_line_that_moves() -> None:
    moving = [
        "concurrency 2: [##########..........] 2 of 4, 2.0 req/s, P99 1.00 s, errors 0",
        "concurrency 2: [###############.....] 3 of 4, 1.5 req/s, P99 1.00 s, errors 1",
    ]
    blank = " " * len(moving[1])
    assert story(Terminal()) == f"warm-up\n\r{moving[0]}\r{moving[1]}\r{blank}\r{LEVELS}"
