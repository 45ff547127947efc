"""Levels for tests, as a measurement would give them."""

import math

from exporter.load.level import Pass, summary
from exporter.load.result import Client, Engine, Level, Memory, Quantiles, Request, Step


def requests(latencies: list[float], *, tokens: int = 10, errors: str = "") -> list[Request]:
    """One after the other; an infinite latency is a failed request of the kind *errors*."""
    made, start = [], 0.0
    for latency in latencies:
        failed = latency == math.inf
        took = 1.0 if failed else latency
        made.append(
            Request(
                start,
                took,
                None if failed else took / 4,
                None if failed else took / 40,
                5,
                0 if failed else tokens,
                errors if failed else "",
                "no answer" if failed else "",
            )
        )
        start += took
    return made


def level(concurrency: int, latencies: list[float], **changes) -> Level:
    """A level of one pass with these latencies."""
    errors = changes.pop("errors", "timeout")
    return summary([Pass(concurrency, requests(latencies, errors=errors), **changes)])


def engine(*, gpu: Memory | None = None, queue: float = 0.001, step: float = 0.02, **changes) -> Engine:
    """A healthy engine on one GPU, preallocating."""
    memory = {"0": gpu or Memory(100e9, 92e9, 40e9, 91.5e9, 0.8)}
    changes = {"memory": memory, "preallocates": True} | changes
    return Engine(
        Quantiles(queue / 2, queue * 0.9, queue, queue / 2),
        {"decode": Step(100.0, step, step, step * 1.2), "prefill": Step(10.0, step * 2, step * 2, step * 3)},
        **changes,
    )


CLIENT = Client(0.2, 0.001, False)
