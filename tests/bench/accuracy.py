#!/usr/bin/env python3
"""How exact the quantiles are: simulated loads, their pages read as in production, and what really happened.

    make bench-accuracy                    # a row for each load, and the summary
    python tests/bench/accuracy.py --json  # the same as JSON
    python tests/bench/accuracy.py --seed 1000  # the same loads with other requests

Beside the refined quantile stand that of the engine's own buckets (native) and that of the exact values in our bounds
(floor), all by the interpolation of Prometheus. An error is relative to the true value; what is below the lowest bound
of ours, 1 ms, counts as 1 ms. Takes minutes, all of it on one core.
"""

import argparse
import asyncio
import json
import math
import statistics
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate

from loads import SECONDS, Case, cases

from exporter import catalog
from exporter.catalog import BY_SHORT, Family
from exporter.engines import profile as profiles
from exporter.lifecycle import Lifecycle
from exporter.quantile import quantile, total
from exporter.simulator import Engine, simulate
from exporter.simulator.metrics import FIRST_TOKEN_BOUNDS, REQUEST_BOUNDS
from exporter.simulator.truth import exact_quantile
from exporter.simulator.virtual import EPOCH
from exporter.sources.scrape import ScrapeSource
from exporter.store import Store

SHORTEST, USUAL, LONGEST = 0.25, 1.0, 5.0
QUANTILES = (0.5, 0.9, 0.99)
FEWEST = 100  # requests of which a P99 says something
LEAST = 0.001  # seconds: our lowest bound
WORSE = 0.02  # than native, at most
BOUNDS = {  # of a request's times, in seconds
    "vllm": REQUEST_BOUNDS,  # TensorRT-LLM's and LMDeploy's too
    "sglang": (
        *(0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
        *(60.0, 70.0, 80.0, 90.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0, 1000.0, 1200.0),
    ),
    "tgi": tuple(0.0001 * 1.5**power for power in range(1, 36)),
}
SIGNALS: dict[str, Family] = {
    "queue_wait": catalog.QUEUE_WAIT,
    "time_to_first_token": catalog.FIRST_TOKEN,
    "latency": catalog.LATENCY,
}
_BUNDLED = profiles.bundled("vllm")
_PROFILE = replace(  # what no time depends on is left out: parsing it would take the most of the bench
    _BUNDLED,
    metrics={s: r for s, r in _BUNDLED.metrics.items() if s == "requests_running" or BY_SHORT[s] in SIGNALS.values()},
    reasons={},
)
_WITHOUT_DECODE = replace(  # times from first token to the end are not on the pages of SGLang and TGI
    _PROFILE,
    metrics={s: tuple(replace(r, latency="", decode="") for r in rules) for s, rules in _PROFILE.page_rules().items()},
)


class Watcher:
    """Stopline's reading of a server, at every poll that is due; no HTTP, and time is the simulation's."""

    url = "http://simulated"

    def __init__(self, every: float, bounds: str = "vllm") -> None:
        self.every = every
        self.store = Store(clock=self._clock, wall=lambda: EPOCH + self._now)
        self._now = 0.0
        self._text = ""
        self._source = ScrapeSource(
            self,
            _PROFILE if bounds == "vllm" else _WITHOUT_DECODE,
            self.store,
            Lifecycle(has_page=True),
            tick=self._never,
            clock=self._clock,
        )

    def poll(self, now: float, text: str) -> None:
        if math.isclose(now / self.every, round(now / self.every)):
            self._now, self._text = now, text
            asyncio.run(self._source.once())

    async def get(self, path: str) -> tuple[str, bool]:
        return self._text, False

    def _clock(self) -> float:
        return self._now

    async def _never(self) -> None:
        raise AssertionError("once() does not wait")


@dataclass(frozen=True, slots=True)
class Row:
    """One quantile of one load, in seconds; *refined* by the seconds between two polls."""

    load: str
    signal: str
    quantile: float
    requests: int
    true: float
    native: float
    floor: float
    refined: dict[float, float]

    def error(self, value: float) -> float:
        """Relative to the true value."""
        true = max(self.true, LEAST)
        return abs(max(value, LEAST) - true) / true

    @property
    def counts(self) -> bool:
        """There are enough requests, and something to measure."""
        return self.requests >= FEWEST and self.true >= LEAST


def measure(case: Case, intervals: tuple[float, ...]) -> Iterator[Row]:
    """Run one load and read it at all *intervals*."""
    watchers = [Watcher(every, case.bounds) for every in intervals]
    truth = simulate(
        Engine(case.engine, case.seed),
        case.load(),
        SECONDS,
        every=min(intervals),
        on_poll=lambda now, text: [watcher.poll(now, text) for watcher in watchers],
        request_bounds=BOUNDS[case.bounds],
    )
    for signal, family in SIGNALS.items():
        values = truth.values(signal)
        coarse = FIRST_TOKEN_BOUNDS if signal == "time_to_first_token" else BOUNDS[case.bounds]
        for q in QUANTILES:
            yield Row(
                load=case.name,
                signal=signal,
                quantile=q,
                requests=len(values),
                true=exact_quantile(values, q),
                native=of_values(values, coarse, q),
                floor=of_values(values, total(watchers[0].store, family)[0], q),
                refined={w.every: quantile(*total(w.store, family), q) or math.nan for w in watchers},
            )


def of_values(values: list[float], bounds: tuple[float, ...], q: float) -> float:
    """The quantile of exact *values* that were put into a histogram of these bounds."""
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    return quantile(bounds, list(accumulate(counts)), q) or math.nan


def summary(rows: list[Row]) -> Iterator[dict[str, object]]:
    """Errors by signal, quantile and what was read."""
    for signal in SIGNALS:
        for q in QUANTILES:
            some = [row for row in rows if (row.signal, row.quantile) == (signal, q) and row.counts]
            yield _errors(signal, q, "native", [row.error(row.native) for row in some])
            yield _errors(signal, q, "floor", [row.error(row.floor) for row in some])
            for every in (SHORTEST, USUAL, LONGEST):
                at = [row.error(row.refined[every]) for row in some if every in row.refined]
                yield _errors(signal, q, f"refined, {every:g} s", at)


def _errors(signal: str, q: float, what: str, errors: list[float]) -> dict[str, object]:
    errors.sort()
    return {
        "signal": signal,
        "quantile": q,
        "what": what,
        "loads": len(errors),
        "median": statistics.median(errors) if errors else None,
        "p90": exact_quantile(errors, 0.9) if errors else None,
        "worst": errors[-1] if errors else None,
    }


def failing(row: Row) -> str:
    """Why a load is worth a look; empty if it is not."""
    ours, native, floor = (row.error(value) for value in (row.refined[USUAL], row.native, row.floor))
    if row.true < LEAST:
        return "at rest, and yet more than 1 ms told" if ours > WORSE else ""
    if ours > native + WORSE:
        return "native is nearer" + (", and nearer than exact values in our bounds" if floor > native + WORSE else "")
    return "off by more than 12 %" if ours > 0.12 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="loads whose name has this")
    parser.add_argument("--seed", type=int, default=0, help="added to the seed of each load")
    arguments = parser.parse_args()
    rows: list[Row] = []
    header = f"{'P99 of the queue wait':36} {'requests':>8} {'true':>10} {'native':>8} {'floor':>8}"
    if not arguments.json:
        print(header + "".join(f" {every:5g} s" for every in (SHORTEST, USUAL, LONGEST)))
    for index, case in enumerate(cases(arguments.seed)):
        if arguments.only in case.name:
            often = (SHORTEST,) if index % 6 == 2 else ()  # reading a page takes the most of the time
            rows += measure(case, (*often, USUAL, LONGEST))
            if not arguments.json:
                row = next(r for r in rows if (r.load, r.signal, r.quantile) == (case.name, "queue_wait", 0.99))
                print(line(row), flush=True)
    table = list(summary(rows))
    odd = [(row, why) for row in rows if (row.signal, row.quantile) == ("queue_wait", 0.99) and (why := failing(row))]
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "summary": table}, indent=2))
        return
    print(f"\n{'error':22} {'quantile':>8} {'of':16} {'loads':>5} {'median':>8} {'90th':>8} {'worst':>8}")
    for entry in table:
        figures = " ".join("       -" if entry[k] is None else f"{entry[k]:8.1%}" for k in ("median", "p90", "worst"))
        print(f"{entry['signal']:22} {entry['quantile']:8g} {entry['what']:16} {entry['loads']:5} {figures}")
    print("\nloads to look at, polled every second:")
    for row, why in odd:
        print(f"{row.load:36} {row.error(row.refined[USUAL]):8.1%}  {why}")


def line(row: Row) -> str:
    errors = [row.error(row.native), row.error(row.floor)]
    refined = [
        f"{row.error(row.refined[e]):6.1%}" if e in row.refined else "     -" for e in (SHORTEST, USUAL, LONGEST)
    ]
    few = "" if row.requests >= FEWEST else "  too few"
    told = " ".join(f"{error:8.1%}" for error in errors)
    return f"{row.load:36} {row.requests:8} {row.true:8.4f} s {told} {' '.join(refined)}{few}"


if __name__ == "__main__":
    main()
