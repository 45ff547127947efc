"""Whatever strangers write: nothing raises, nothing hangs, and what can be read is read as the stock parser does.

A million inputs, half a minute. STOPLINE_FUZZ multiplies the numbers of inputs; a failure's input is `mutations(target, inputs=N)`'s of the same seed.
"""

import os
import time
from random import Random

import pytest
from campaign import Tally, mutations
from hypothesis import given, settings
from hypothesis import strategies as st
from mutate import grown
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from targets import Target, targets

from exporter.engines import profile as profiles
from exporter.sources.page import PageReader

TIMES = int(os.environ.get("STOPLINE_FUZZ", "1"))
INPUTS = {
    "chunks": 250_000,
    "peel": 120_000,
    "lines": 90_000,
    "facts": 80_000,
    "page": 25_000,
    "openmetrics": 45_000,
    "spans": 200_000,
    "iterations": 180_000,
    "settings": 2_000,
    "profile": 2_000,
    "web file": 3_000,
    "pins": 3_000,
}
MIB = 1 << 20
ALL = [pytest.param(target, id=target.name) for target in targets()]


def test_every_target_has_its_number() -> None:
    assert list(INPUTS) == [target.name for target in targets()]
    assert sum(INPUTS.values()) == 1_000_000


@pytest.mark.parametrize("target", ALL)
def test_mutated_captures_neither_raise_nor_hang(target: Target) -> None:
    tally = mutations(target, inputs=INPUTS[target.name] * TIMES)
    assert tally.found == []
    assert tally.inputs == INPUTS[target.name] * TIMES


def test_what_raises_or_hangs_is_found() -> None:
    def fail(data: bytes) -> None:
        raise KeyError(data)

    def hang(_: bytes) -> None:
        end = time.process_time() + 0.11
        while time.process_time() < end:
            pass

    tally = Tally()
    for run in (fail, hang):
        tally.add(Target("broken", run, ()), b"x")
    (raised, first), (hung, second) = tally.found
    assert "KeyError: b'x'" in raised
    assert hung.endswith(" s for 1 bytes")
    assert (first, second) == (b"x", b"x")


@pytest.mark.parametrize("target", [case for case in ALL if case.values[0].strangers])
def test_a_mebibyte_of_it_holds_nobody_up(target: Target) -> None:
    """Measured are 60 to 140 ms at most; the bound is for what grows faster than its input."""
    data = grown(Random(1), target.seeds, MIB)

    def seconds() -> float:
        began = time.process_time()
        target.run(data)
        return time.process_time() - began

    assert min(seconds() for _ in range(2)) < 4 * target.slow


NAMES = {
    "vllm:num_requests_running": Gauge,
    "vllm:generation_tokens": Counter,
    "vllm:prompt_tokens": Counter,
    "vllm:time_to_first_token_seconds": Histogram,
    "vllm:request_queue_time_seconds": Histogram,
}
PUT = {Gauge: "set", Counter: "inc", Histogram: "observe"}
NUMBERS = st.floats(0, 1e15) | st.integers(0, 10**15).map(float)


@settings(max_examples=100 * TIMES, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=12), NUMBERS, max_size=3)))
def test_a_page_reads_as_the_stock_parser_reads_it(pages: dict[str, dict[str, float]]) -> None:
    registry = CollectorRegistry()
    Gauge("vllm:cache_config_info", "There is always something.", registry=registry).set(1)
    for name, series in pages.items():
        family = NAMES[name](name, "Anything.", ["model_name"], registry=registry)
        for label, number in series.items():
            getattr(family.labels(label), PUT[NAMES[name]])(number)
    text = "\n".join(line for line in generate_latest(registry).decode().split("\n") if "_created" not in line)
    stock = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    read = PageReader(profiles.bundled("vllm")).read(text)
    assert {key: value for series in read.samples.values() for key, value in series.items()} == stock
