#!/usr/bin/env python3
"""What Stopline costs, beside what a user would take instead, in one run: CPU seconds and their ratio.

    make bench                       # table
    python tests/bench/run.py --json # the same as JSON

Machines are shared and noisy: every figure is CPU time, the contestants alternate, and the median of the rounds
counts. Ratios can be compared between machines, seconds cannot.
"""

import argparse
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from exporter import catalog
from exporter.collector import StoreCollector
from exporter.engines import profile as profiles
from exporter.lifecycle import Lifecycle
from exporter.sources.files import LogFiles
from exporter.sources.lines import Lines
from exporter.sources.page import PageReader
from exporter.store import Store

FIXTURES = Path(__file__).parent.parent / "fixtures"
CACHE = Path(__file__).parent.parent.parent / ".cache" / "bench"
ROUNDS = 3


def make_log(path: Path, megabytes: int) -> int:
    """A vLLM log: 80 % access, stats and request lines, 18 % step lines, 2 % errors. Returns its step lines."""
    rng = random.Random(1)
    steps = 0
    noise = [
        'INFO:     127.0.0.1:{n} - "POST /v1/completions HTTP/1.1" 200 OK\n',
        'INFO:     127.0.0.1:{n} - "GET /metrics HTTP/1.1" 200 OK\n',
        "(APIServer pid=914) INFO 11-30 07:26:42 [loggers.py:111] Added request cmpl-{n}.\n",
        "(APIServer pid=914) INFO 11-30 07:26:42 [request_logger.py:65] Received request cmpl-{n}: prompt: 'why do I see "
        "CUDA out of memory and an ERROR in my log', params: SamplingParams(n=1, seed=0), lora_request: None.\n",
    ]
    step = (
        "(APIServer pid=914) INFO 11-30 07:26:42 [loggers.py:199] Engine 000: Iteration({n}): 0 context requests, 0 "
        "context tokens, {k} generation requests, {k} generation tokens, iteration elapsed time: {ms:.2f} ms, GPU KV "
        "cache usage: 1.0%\n"
    )
    error = "(Worker pid=997) ERROR 11-30 07:26:42 [worker.py:12] torch.OutOfMemoryError: CUDA out of memory.\n"
    with path.open("w") as out:
        while out.tell() < megabytes << 20:
            lines = []
            for n in range(10_000):
                pick = rng.random()
                if pick < 0.80:
                    lines.append(rng.choice(noise).format(n=n))
                elif pick < 0.98:
                    steps += 1
                    lines.append(step.format(n=n, k=1 + n % 63, ms=rng.uniform(5, 50)))
                else:
                    lines.append(error)
            out.writelines(lines)
    return steps


def stopline_log(path: Path) -> int:
    """The product: tailer, whole vLLM profile, store."""
    store = Store()
    lines = Lines("log", profiles.bundled("vllm"), store, Lifecycle(has_page=False), clock=time.monotonic)
    files = LogFiles(path, checkpoint=None, clock=time.monotonic, wall=time.time, from_start=True)
    for chunk in files.poll():
        lines.feed(chunk.data, history=False)
    files.close()
    return sum(b.cumulative()[-1] for b in store.histograms[catalog.STEP_LATENCY].values())


def plain_log(path: Path) -> int:
    """What one writes in an afternoon: a loop over lines, a regex for each thing, prometheus_client."""
    registry = CollectorRegistry()
    steps = Histogram("steps", "x", ["phase"], buckets=catalog.geometric(0.0001, 60, 1.15), registry=registry)
    errors = Counter("errors", "x", ["kind"], registry=registry)
    step = re.compile(
        r"(\d+) context requests, \d+ context tokens, (\d+) generation requests.*iteration elapsed time: ([\d.]+) ms"
    )
    kinds = {
        "out_of_memory": re.compile("ERROR.*out of memory"),
        "cuda": re.compile("ERROR.*CUDA error"),
        "timeout": re.compile("ERROR.*timed out"),
        "engine_dead": re.compile("ERROR.*EngineDeadError"),
    }
    count = 0
    with path.open(errors="replace") as log:
        for line in log:
            if match := step.search(line):
                phase = "mixed" if match[1] != "0" and match[2] != "0" else "decode" if match[2] != "0" else "prefill"
                steps.labels(phase).observe(float(match[3]) / 1000)
                count += 1
            for kind, regex in kinds.items():
                if regex.search(line):
                    errors.labels(kind).inc()
                    break
    return count


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
    parser.add_argument("--megabytes", type=int, default=50)
    arguments = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    log = CACHE / "mixed.log"
    steps = make_log(log, arguments.megabytes)
    for name, function in (("stopline", stopline_log), ("plain", plain_log)):
        counted = function(log)
        if counted != steps:
            sys.exit(f"{name} counted {counted} steps of {steps}")
    rows = []
    for what, ours, theirs, instead in (
        (
            f"{arguments.megabytes} MB mixed vLLM log",
            lambda: stopline_log(log),
            lambda: plain_log(log),
            "loop and regexes",
        ),
        ("vLLM page read 20 times", stopline_page, plain_page, "stock parser, whole page"),
    ):
        mine, other = versus(ours, theirs)
        rows.append({"what": what, "stopline_s": mine, "instead_s": other, "instead": instead, "ratio": other / mine})
    rows.append({"what": "page of 1,200 series rendered 20 times", "stopline_s": cpu(exposition)})
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'what':40} {'Stopline':>10} {'instead':>10} {'ratio':>7}")
    for row in rows:
        other = f"{row['instead_s']:9.3f}s {row['ratio']:6.1f}x  {row['instead']}" if "ratio" in row else ""
        print(f"{row['what']:40} {row['stopline_s']:9.3f}s {other}")


if __name__ == "__main__":
    main()
