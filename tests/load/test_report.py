"""The table of a ramp and its sentences."""

import math

from measured import CLIENT, engine, level

from exporter.load import report, table
from exporter.load.result import Memory, Run, Tripped, Verdict
from exporter.load.verdict import Limits


def run() -> Run:
    levels = [
        level(1, [1.0] * 60, engine=engine(), client=CLIENT),
        level(2, [1.0] * 40 + [1.5] * 20, engine=engine(queue=0.3)),
        level(4, [1.0] * 58 + [math.inf] * 2, errors="rejected", engine=engine(gpu=Memory(100e9, 98e9))),
    ]
    why = "2 rejected"
    verdict = Verdict(
        f"errors line crossed at concurrency 4: {why}; concurrency 2 is the last good level",
        2,
        Tripped("errors", 4, why),
        True,
        ["interrupted"],
    )
    limits = {name: getattr(Limits(), name) for name in ("latency_ratio", "latency_floor_seconds")}
    return Run({}, levels, 1, limits, verdict)


def test_as_text(golden) -> None:
    golden("ramp.txt", "\n".join(report.ramp(run())) + "\n")


def test_as_markdown(golden) -> None:
    golden("ramp.md", "\n".join(report.ramp(run(), table.markdown)) + "\n")


def test_numbers_as_a_person_reads_them() -> None:
    assert [table.time(t) for t in (None, math.nan, math.inf, 0.0123, 12.3)] == [
        "-",
        "-",
        "failed",
        "12.3 ms",
        "12.30 s",
    ]
    assert [table.change(c) for c in (None, math.nan, math.inf, 0.5, -0.012)] == ["-", "-", "failed", "+50.0%", "-1.2%"]
    assert [table.size(s) for s in (None, 2**30)] == ["-", "1.0 GiB"]
    assert [table.number(n) for n in (None, 2.0)] == ["-", "2.0"]


def test_a_column_that_nobody_knows_is_left_out() -> None:
    assert table.text(("a", "b", "c"), [("1", "-", "x"), ("22", "-", "")]) == [" a  c", " 1  x", "22"]
    assert table.markdown(("a", "b"), [("1|2", "-")]) == ["| a | b |", "| --- | --- |", "| 1\\|2 | - |"]
