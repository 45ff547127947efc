"""The three lines, and which level comes next: no network, no clock."""

import math

import pytest
from measured import engine, level, requests

from exporter.load.level import Pass, steady, summary
from exporter.load.result import Client, Memory, Tripped, Verdict
from exporter.load.verdict import Limits, Search, memory

GIB = float(2**30)


def drive(search: Search, p99s: dict[int, list[float]], **changes) -> list[int]:
    """Levels in the order they were asked for; each pass has the next of the given latencies, for all requests."""
    asked: list[int] = []
    passes: dict[int, list[Pass]] = {}
    while (concurrency := search.next()) is not None:
        asked.append(concurrency)
        made = passes.setdefault(concurrency, [])
        latency = p99s[concurrency][len(made)]
        made.append(Pass(concurrency, requests([latency] * 100), **changes))
        search.tell(summary(made[-1:]), (steady if concurrency == search.levels[0] else summary)(made))
    return asked


def limited(limit: int, *levels: int) -> dict[int, list[float]]:
    """Latency 1 below *limit*, 3 from there on."""
    return {n: [3.0 if n >= limit else 1.0] * 3 for n in levels}


def test_the_latency_line_is_the_ratio_and_the_floor() -> None:
    assert Limits().latency(1.0) == 2.0
    assert Limits().latency(0.01) == pytest.approx(0.06)
    assert Limits(latency_ratio=3.0, latency_floor_seconds=0.0).latency(0.01) == pytest.approx(0.03)


def test_it_goes_up_until_a_confirmed_trip_then_in_between() -> None:
    search = Search((1, 2, 4, 8, 16, 32))
    assert drive(search, limited(11, *range(1, 33))) == [1, 2, 4, 8, 16, 16, 12, 12, 10, 11, 11]
    why = "P99 3.00 s is 3.00 times the 1.00 s of concurrency 1, the line is 2.00 s"
    assert search.verdict() == Verdict(
        f"latency line crossed at concurrency 11: {why}; concurrency 10 is the last good level",
        10,
        Tripped("latency", 11, why),
        True,
        ["memory, queue and step were not judged: give --sidecar"],
    )


def test_a_coarser_precision_ends_the_search_earlier() -> None:
    assert drive(Search((1, 32), precision=0.5), limited(30, *range(1, 33))) == [1, 32, 32, 16]
    assert drive(Search((1, 32), refine=False), limited(30, *range(1, 33))) == [1, 32, 32]


def test_one_pass_above_the_line_is_no_trip() -> None:
    search = Search((1, 2, 4))
    assert drive(search, {1: [1.0], 2: [3.0, 1.0, 1.0], 4: [1.0]}) == [1, 2, 2, 2, 4]
    assert search.verdict().tripped is None
    assert search.verdict().text == "no line crossed up to concurrency 4"
    assert search.verdict().notes[0] == ("concurrency 2 is not counted as above the line: 1 of 3 passes was")


def test_two_passes_of_three_are_a_trip() -> None:
    search = Search((1, 2), refine=False)
    assert drive(search, {1: [1.0], 2: [3.0, 1.0, 3.0]}) == [1, 2, 2, 2]
    assert search.bad is not None


def test_the_baseline_is_the_middle_of_its_passes() -> None:
    search = Search((1, 2), baselines=2, refine=False)
    assert drive(search, {1: [1.0, 1.1], 2: [2.05] * 3}) == [1, 1, 2, 2]
    assert search.baseline == 1.0
    search = Search((1, 2), baselines=2, refine=False)
    assert drive(search, {1: [3.0, 1.0, 1.2], 2: [2.3] * 3}) == [1, 1, 1, 2]
    assert search.baseline == 1.2
    assert search.verdict().notes[0] == (
        "the baseline is unsteady: P99 of its passes was 3.00 s, 1.00 s, 1.20 s; is the machine shared?"
    )


def test_without_confirmation_the_first_pass_decides() -> None:
    assert drive(Search((1, 2), confirmations=0), {1: [1.0], 2: [3.0]}) == [1, 2]


def test_all_levels_good() -> None:
    search = Search((1, 2, 4))
    drive(search, limited(9, 1, 2, 4), engine=engine())
    assert search.verdict() == Verdict("no line crossed up to concurrency 4", 4)


def test_few_requests_do_not_decide() -> None:
    search = Search((1, 2))
    for concurrency, latency in ((1, 1.0), (2, 9.0)):
        one = level(concurrency, [latency] * 49)
        search.tell(one, one)
    assert search.bad is None
    assert search.verdict().notes[0] == "latency was not judged at concurrency 1, 2: it takes 50 requests (--requests)"


def test_one_failed_request_trips_the_error_line() -> None:
    search = Search((1, 2, 4))
    for one in (level(1, [1.0] * 100), level(2, [1.0] * 99 + [math.inf], errors="server_error")):
        search.tell(one, one)
    assert search.next() is None
    assert search.verdict().text == (
        "errors line crossed at concurrency 2: 1 server_error; concurrency 1 is the last good level"
    )


def test_what_the_engine_tells_is_an_error_too() -> None:
    search = Search((1, 2))
    one = level(1, [1.0] * 100, engine=engine(errors={"cuda": 2.0}))
    search.tell(one, one)
    assert search.verdict().text == (
        "errors line crossed at concurrency 1: 2 cuda (told by the engine); no lower level was good"
    )
    assert search.verdict().good is None


def test_refused_requests_are_searched_for_a_lower_level_but_a_dead_engine_is_not() -> None:
    for kind, following in (("rejected", 6), ("connection", None)):
        search = Search((1, 4, 8))
        for one in (level(1, [1.0] * 60), level(4, [1.0] * 60), level(8, [1.0] * 60 + [math.inf], errors=kind)):
            search.tell(one, one)
        assert search.next() == following


@pytest.mark.parametrize(
    ("gpu", "changes", "why"),
    [
        (Memory(80 * GIB, 79.5 * GIB), {}, "GPU 0 has 0.50 GiB free, under 1.00 GiB"),
        (Memory(80 * GIB, 76 * GIB), {"preallocates": False}, "GPU 0 is 95% full, above 90%"),
        (Memory(80 * GIB, 76 * GIB), {"preallocates": None}, "GPU 0 is 95% full, above 90%"),
        (Memory(80 * GIB, 76 * GIB, plateau=74.5 * GIB), {}, "GPU 0 grew 1.50 GiB above its resting use"),
        (Memory(80 * GIB, 76 * GIB, plateau=75.5 * GIB), {}, ""),
        (Memory(80 * GIB, 76 * GIB), {}, ""),
        (Memory(80 * GIB, 40 * GIB), {"preallocates": False}, ""),
        (
            Memory(80 * GIB, 40 * GIB),
            {"kv_cache_usage": 0.97, "kv_cache_full": True},
            "the KV cache is 97% full, and requests wait or are preempted",
        ),
    ],
)
def test_the_memory_line(gpu: Memory, changes: dict, why: str) -> None:
    assert memory(level(2, [1.0] * 60, engine=engine(gpu=gpu, **changes)), Limits()) == why


def test_memory_ends_the_ramp_and_is_not_searched_further() -> None:
    search = Search((1, 4, 8))
    full = engine(gpu=Memory(80 * GIB, 79.5 * GIB))
    for one in (level(1, [1.0] * 60, engine=engine()), level(4, [1.0] * 60, engine=full)):
        search.tell(one, one)
    assert search.next() is None
    assert search.verdict() == Verdict(
        "memory line crossed at concurrency 4: GPU 0 has 0.50 GiB free, under 1.00 GiB; "
        "concurrency 1 is the last good level",
        1,
        Tripped("memory", 4, "GPU 0 has 0.50 GiB free, under 1.00 GiB"),
    )


def test_an_interrupted_ramp_tells_how_far_it_came() -> None:
    search = Search((1, 2, 4))
    first, cut = level(1, [1.0] * 60), level(2, [1.0] * 10, complete=False)
    search.tell(first, first)
    search.tell(cut, cut)
    search.stop("interrupted")
    assert search.next() is None
    assert search.verdict() == Verdict(
        "no line crossed so far, good up to concurrency 1; not all levels were measured",
        1,
        None,
        False,
        ["interrupted", "memory, queue and step were not judged: give --sidecar"],
    )
    search = Search((1, 2))
    for one in (level(1, [1.0] * 60), level(2, [3.0] * 60)):
        search.tell(one, one)
    search.stop("--max-seconds 9 are over")
    assert search.verdict().notes[:2] == [
        "--max-seconds 9 are over",
        "concurrency 2 was above the line, and is not confirmed",
    ]
    empty = Search((1, 2))
    empty.stop("interrupted")
    assert empty.verdict().text == "no line crossed so far, no level was completed; not all levels were measured"
    assert empty.verdict().notes == ["interrupted"]


def test_a_client_that_is_its_own_limit_is_named() -> None:
    search = Search((1, 2))
    drive(search, limited(9, 1, 2), engine=engine(), client=Client(0.99, 0.2, True))
    assert search.verdict().notes == ["client_limited at concurrency 1, 2: the client, not the server, may be measured"]
