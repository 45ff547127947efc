#!/usr/bin/env python3
"""Whether `stopline ramp` finds the true limit: its decisions on simulated engines whose limit is known.

    make bench-ramp                   # 30 seeds on each engine, some minutes
    python tests/bench/ramp.py --seeds 5

The engine runs in virtual time and its latencies go to the code that decides, the same that a real ramp uses. The
truth is the P99 of many requests at each level. A stop is false where the true P99 of the level is under the line.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from exporter.load.bench import ROUNDS
from exporter.load.level import Pass, steady, summary
from exporter.load.mix import Lengths, Mix
from exporter.load.result import Request
from exporter.load.stats import quantile
from exporter.load.verdict import Limits, Search
from exporter.simulator import Engine, EngineConfig
from exporter.simulator.load import ClosedLoop
from exporter.simulator.records import Observer, RequestRecord
from exporter.simulator.records import Request as Asked

LEVELS = (1, 2, 4, 8, 16, 32, 64, 128)
REQUESTS = 200
TRUTH = 6000


@dataclass(frozen=True, eq=False)
class Case:
    """An engine and what is asked of it."""

    name: str
    engine: EngineConfig
    mix: Mix
    levels: tuple[int, ...] = LEVELS


def lognormal(prompt: float, output: float) -> Mix:
    """Lengths as a user's file would have them: 2000 of them around these medians."""
    random = Random(0)
    pairs = [(_length(random, prompt, 2000), _length(random, output, 128)) for _ in range(2000)]
    return Mix(pairs=tuple(pairs))


def _length(random: Random, median: float, most: int) -> int:
    return min(max(round(random.lognormvariate(math.log(median), 0.4)), 1), most)


_TINY = EngineConfig.tiny(kv_blocks=8192, kv_bytes_per_token=2**15)
_HY3 = EngineConfig.hy3_h20
CASES = (
    Case("eight places, equal lengths", _TINY, Mix(input_tokens=Lengths(8, 8), output_tokens=Lengths(32, 32))),
    Case("eight places, mixed lengths", _TINY, Mix(input_tokens=Lengths(8, 64), output_tokens=Lengths(16, 64))),
    Case("64 places, step that grows", _HY3(), lognormal(300, 40)),
    Case(
        "64 places, flat step",
        _HY3(step_per_decode_seconds=0.0001, step_per_prefill_token_seconds=0.00001),
        lognormal(100, 40),
        (*LEVELS, 256),
    ),
    Case(
        "64 places, never above 1.8",
        _HY3(step_per_decode_seconds=0.00029, step_per_prefill_token_seconds=0.00001),
        lognormal(100, 40),
        (1, 2, 4, 8, 16, 32, 48, 56, 60, 64),
    ),
)


@dataclass
class _Finished(Observer):
    """The first *count* requests after the first *skip*, in the order they began."""

    skip: int
    count: int
    began: dict[str, int] = field(default_factory=dict)
    seen: list[Request] = field(default_factory=list)

    def on_arrival(self, record: RequestRecord) -> None:
        self.began[record.id] = len(self.began)

    def on_finish(self, record: RequestRecord) -> None:
        number = self.began[record.id] - self.skip
        if record.latency is not None and number < self.count:
            request = Request(record.arrival, record.latency, record.time_to_first_token, generated_tokens=1)
            self.seen.extend([request] if number >= 0 else [])

    @property
    def done(self) -> bool:
        return len(self.seen) >= self.count


def measure(case: Case, concurrency: int, *, count: int, seed: int) -> list[Request]:
    """*count* requests in a closed loop, after one round of warm-up."""
    engine = Engine(case.engine, seed)
    mix = replace(case.mix, seed=seed)
    lengths = itertools.chain(mix.lengths(concurrency), mix.lengths(count), itertools.cycle(mix.lengths(concurrency)))
    finished = _Finished(concurrency, count)
    engine.attach(finished)
    load = ClosedLoop(concurrency, mix=lambda _: _request(*next(lengths)))
    load.start(engine)
    while not finished.done:
        engine.advance(engine.now + 1.0)
    load.stop()
    return finished.seen


def _request(prompt: int, output: int) -> Asked:
    return Asked(prompt_tokens=prompt, output_tokens=output, max_tokens=output)


@cache
def true_p99(case: Case, concurrency: int) -> float:
    seen = measure(case, concurrency, count=TRUTH, seed=10_000)
    return quantile([s.latency for s in seen], 0.99)


@dataclass(frozen=True)
class Outcome:
    good: int | None
    bad: int | None
    false_stop: bool
    """The level that ended the climb is truly under the line."""
    right: bool
    """The true limit lies between good and bad, or within one step of refinement of them."""
    requests: int


def search(case: Case, seed: int, told: list[int] | None = None, **options) -> Search:
    """A whole ramp; *told* gets the concurrency of each pass."""
    found = Search(case.levels, **({"baselines": 2} | options))
    passes: dict[int, list[Pass]] = {}
    while (concurrency := found.next()) is not None:
        made = passes.setdefault(concurrency, [])
        count = max(REQUESTS, ROUNDS * concurrency)
        number = seed * 10_000 + concurrency * 10 + len(made)
        made.append(Pass(concurrency, measure(case, concurrency, count=count, seed=number)))
        found.tell(summary(made[-1:]), (steady if concurrency == case.levels[0] else summary)(made))
        if told is not None:
            told.append(concurrency)
    return found


def outcome(case: Case, seed: int, **options) -> Outcome:
    """A whole ramp beside the truth."""
    told: list[int] = []
    found = search(case, seed, told, **options)
    bad = found.bad.concurrency if found.bad else None
    limit, line = truth(case), Limits().latency(true_p99(case, 1))
    climbed = [n for n in case.levels if n in found.measured]
    step = max(1, round(found.precision * (bad or 0)))
    right = bad is None if limit is None else bad is not None and (found.good or 0) - step < limit <= bad + step
    false_stop = bad is not None and true_p99(case, climbed[-1]) < line
    return Outcome(found.good, bad, false_stop, right, sum(max(REQUESTS, ROUNDS * n) for n in told))


@cache
def truth(case: Case) -> int | None:
    """The lowest concurrency whose true P99 is at the line or above; None if there is none among the levels."""
    line = Limits().latency(true_p99(case, 1))
    high = next((n for n in case.levels if true_p99(case, n) >= line), None)
    if high is None:
        return None
    low = max([n for n in case.levels if n < high], default=0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if true_p99(case, middle) >= line else (middle, high)
    return high


def highest(case: Case) -> float:
    """The highest true P99 of the levels over that of level 1."""
    return max(true_p99(case, n) for n in case.levels) / true_p99(case, 1)


def table(seeds: int, **options) -> Iterator[str]:
    yield "engine                        true limit   found, median (range)   right   false stops   requests"
    for case in CASES:
        outcomes = [outcome(case, seed, **options) for seed in range(1, seeds + 1)]
        bads = sorted(o.bad or 0 for o in outcomes)
        yield (
            f"{case.name:30}{truth(case) or 'none':>10}{statistics.median(bads):12g} ({bads[0]} to {bads[-1]})"
            f"{sum(o.right for o in outcomes):10}/{seeds}{sum(o.false_stop for o in outcomes):10}/{seeds}"
            f"{statistics.mean(o.requests for o in outcomes):12.0f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--confirmations", type=int, default=2)
    arguments = parser.parse_args()
    for line in table(arguments.seeds, confirmations=arguments.confirmations):
        print(line, flush=True)
