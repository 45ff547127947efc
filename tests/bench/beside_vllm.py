#!/usr/bin/env python3
"""Beside a real vLLM that serves Hy3's architecture on the CPU: how exact the figures are, and what watching costs.

    make bench-engine                        # tables; installs vLLM into .cache/engines where it is not there yet
    python tests/bench/beside_vllm.py --json # the same as JSON

Exactness: quantiles by the traces (each request's own times), refined from the page, by vLLM's own buckets, and as the
client saw them. Cost: rounds of the same load with the sidecar and without, in turns, and the CPU time of both.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import asyncio

from load import Seen, drive
from prometheus_client.parser import text_string_to_metric_families
from realengine import Page, Server, Watcher, free_port, get, traced_watcher, until, vllm, with_traces

SIGNALS = {
    "queue wait": ("request_queue_wait_seconds", "vllm:request_queue_time_seconds", None),
    "first token": ("request_time_to_first_token_seconds", "vllm:time_to_first_token_seconds", "first_token"),
    "latency": ("request_latency_seconds", "vllm:e2e_request_latency_seconds", "latency"),
}
LEVELS = ((4, 120), (16, 200), (32, 250))
ROUNDS = 6
CONCURRENCY, SECONDS = 8, 20.0
PAGES = 200


class Native(Page):
    """vLLM's own page, asked for quantiles as ours is."""

    def __init__(self, text: str) -> None:
        self.samples = {
            (f"stopline_{s.name}", frozenset(s.labels.items())): s.value
            for f in text_string_to_metric_families(text)
            for s in f.samples
        }


def load(server: Server, **options: Any) -> list[Seen]:
    return asyncio.run(drive(server.url, "hy3", words=10, tokens=32, **options))


def quantile(values: list[float], q: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * q) - 1]


def exactness(server: Server, traced: Watcher) -> list[dict[str, Any]]:
    """One row for each level, signal and quantile; seconds."""
    rows = []
    with Watcher("--engine-url", server.url, "--gpus", "none") as refined:
        for concurrency, requests in LEVELS:
            before = refined.settled(), Native(get(server.url + "/metrics")), traced.page()
            seen = load(server, concurrency=concurrency, requests=requests)
            spans_come(traced, before[2]("request_latency_seconds_count") + len(seen))
            after = refined.settled(), Native(get(server.url + "/metrics")), traced.page()
            for signal, (ours, theirs, attribute) in SIGNALS.items():
                for q in (0.5, 0.9, 0.99):
                    row: dict[str, Any] = {"clients": concurrency, "signal": signal, "quantile": q}
                    row["traces"] = after[2].quantile(q, ours, before[2], source="trace")
                    row["refined"] = after[0].quantile(q, ours, before[0], source="metrics")
                    row["native"] = after[1].quantile(q, theirs, before[1])
                    row["client"] = quantile([getattr(s, attribute) for s in seen], q) if attribute else None
                    rows.append(row)
    return rows


def spans_come(traced: Watcher, count: float) -> None:
    until(lambda: traced.page()("request_latency_seconds_count") == count, 20, "a span of each request")


def cpu_of(*pids: int) -> float:
    """CPU seconds that processes have used."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def price_of_a_page(server: Server) -> dict[str, float]:
    """What one answer of /metrics costs vLLM's API server."""
    assert server.process is not None
    began, used = time.monotonic(), cpu_of(server.process.pid)
    size = sum(len(get(server.url + "/metrics")) for _ in range(PAGES)) / PAGES
    seconds = cpu_of(server.process.pid) - used
    return {
        "engine_cpu_ms_per_page": 1000 * seconds / PAGES,
        "answer_ms": 1000 * (time.monotonic() - began) / PAGES,
        "page_bytes": size,
    }


def round_of(server: Server, *, watched: bool, seed: int) -> dict[str, float]:
    """One round of load; requests per second and P99 as the client saw them, CPU shares of one core."""

    def go() -> tuple[list[Seen], float]:
        began = time.monotonic()
        seen = load(server, concurrency=CONCURRENCY, requests=1, seconds=SECONDS, seed=seed)
        return seen, time.monotonic() - began

    used = cpu_of(server.process.pid, *server.children())
    if watched:
        with Watcher("--engine-url", server.url, "--log", str(server.log), "--gpus", "none") as watcher:
            watcher.settled()
            before = cpu_of(watcher.process.pid)
            seen, seconds = go()
            share = (cpu_of(watcher.process.pid) - before) / seconds
    else:
        (seen, seconds), share = go(), 0.0
    assert {s.status for s in seen} == {200}
    return {
        "requests_per_second": len(seen) / seconds,
        "p99_seconds": quantile([s.latency for s in seen], 0.99),
        "sidecar_cpu_share": share,
        "engine_cpu_seconds_per_request": (cpu_of(server.process.pid, *server.children()) - used) / len(seen),
    }


def cost(server: Server) -> dict[str, Any]:
    """Rounds with the sidecar and without, in turns; medians, and how far the rounds of one kind lie apart."""
    rounds = [{w: round_of(server, watched=w == "with", seed=n) for w in ("with", "without")} for n in range(ROUNDS)]
    figures: dict[str, Any] = price_of_a_page(server)
    figures["sidecar_cpu_share"] = statistics.median(r["with"]["sidecar_cpu_share"] for r in rounds)
    for name in ("requests_per_second", "p99_seconds", "engine_cpu_seconds_per_request"):
        told = {w: [r[w][name] for r in rounds] for w in ("with", "without")}
        without = statistics.median(told["without"])
        figures[name] = {
            "with": statistics.median(told["with"]),
            "without": without,
            "difference": statistics.median(told["with"]) / without - 1,
            "noise": (max(told["without"]) - min(told["without"])) / without,
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    with tempfile.TemporaryDirectory(prefix="stopline-bench-") as directory:
        port = free_port()
        arguments, environment = with_traces(port)
        with (
            vllm(Path(directory) / "server.log", *arguments, **environment) as server,
            traced_watcher(server, port, Path(directory)) as traced,
        ):
            server.start(180)
            until(lambda: traced.page()("engine_up") == 1, 20, "engine up")
            load(server, concurrency=4, requests=16)
            until(lambda: traced.page()("request_latency_seconds_count", source="trace"), 20, "spans come")
            rows = exactness(server, traced)
        with vllm(Path(directory) / "untraced.log") as server:
            server.start(180)
            load(server, concurrency=4, requests=16)
            figures = cost(server)
    if as_json:
        print(json.dumps({"exactness": rows, "cost": figures}, indent=2))
        return
    print(
        f"{'clients':>7} {'signal':12} {'':4} {'traces':>9} {'refined':>9} {'native':>9} {'client':>9}  refined/traces"
    )
    for row in rows:
        client = "-" if row["client"] is None else f"{row['client']:.4f}"
        ratio = row["refined"] / row["traces"] if row["traces"] else 1.0
        print(
            f"{row['clients']:7} {row['signal']:12} P{100 * row['quantile']:<3.0f} {row['traces']:9.4f} "
            f"{row['refined']:9.4f} {row['native']:9.4f} {client:>9}  {ratio:.3f}"
        )
    for name, figure in figures.items():
        print(name, figure if isinstance(figure, float) else {k: round(v, 4) for k, v in figure.items()})


if __name__ == "__main__":
    main()
