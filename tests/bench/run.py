#!/usr/bin/env python3
"""What Stopline costs, beside what a user would take instead, in one run: CPU seconds and their ratio.

    make bench                       # table
    python tests/bench/run.py --json # the same as JSON

Machines are shared and noisy: every figure is CPU time, the contestants alternate, and the median of the rounds
counts. Ratios can be compared between machines, seconds cannot.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import log_path
import vllm_log
from log_path import Row
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from exporter import catalog
from exporter.collector import StoreCollector
from exporter.engines import profile as profiles
from exporter.lifecycle import Lifecycle
from exporter.sources.page import PageReader
from exporter.store import Store

FIXTURES = Path(__file__).parent.parent / "fixtures"
ROUNDS = 3


PAGE = (FIXTURES / "vllm/0.32.0-hy3/metrics-queueing.txt").read_text()


def stopline_page() -> int:
    reader = PageReader(profiles.bundled("vllm"))
    return sum(len(reader.read(PAGE).samples) for _ in range(20))


def plain_page() -> int:
    return sum(len(list(text_string_to_metric_families(PAGE))) for _ in range(20))


def exposition() -> int:
    store = Store()
    for model in range(4):
        for family in (catalog.QUEUE_WAIT, catalog.FIRST_TOKEN, catalog.LATENCY):
            store.observe(family, (f"m{model}",), 0.1, origin="metrics")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StoreCollector(store, Lifecycle(has_page=True)))
    return sum(len(generate_latest(registry)) for _ in range(20))


def cpu(function: Callable[[], object]) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def versus(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """Median CPU seconds of both, taken in turns."""
    times = [(cpu(ours), cpu(theirs)) for _ in range(ROUNDS)]
    return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--megabytes", type=int, default=30, help="of each log that is read whole")
    parser.add_argument("--backlog", type=int, default=200, help="megabytes that are there at once")
    parser.add_argument("--seconds", type=float, default=15, help="for which a growing log is followed")
    arguments = parser.parse_args()
    rows = [
        log_path.read(mix, arguments.megabytes, ROUNDS) for mix in (vllm_log.MIXED, vllm_log.SPARSE, vllm_log.DENSE)
    ]
    rows += [log_path.backlog(arguments.backlog), *log_path.following(arguments.seconds)]
    mine, other = versus(stopline_page, plain_page)
    rows.append(Row("vLLM page read 20 times", "CPU s", mine, other, "stock parser, whole page", other / mine))
    rows.append(Row("page of 1,200 series rendered 20 times", "CPU s", cpu(exposition)))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{'what':42} {'unit':>12} {'Stopline':>9} {'instead':>9} {'ratio':>6}")
    for row in rows:
        other = "" if row.instead is None else f"{row.instead:9.3f} {row.ratio:5.1f}x  {row.of}"
        print(f"{row.what:42} {row.unit:>12} {row.stopline:9.3f} {other}")


if __name__ == "__main__":
    main()
