#!/usr/bin/env python3
"""What the rules cost a real Prometheus that scrapes many Stoplines: time of evaluation, memory, series.

    make bench-rules                                  # 1,000 replicas, a week of recorded baseline
    python tests/bench/scale.py --replicas 100 --json

The pages are those of real sidecars beside simulated engines, an hour of them, served again and again under the names
of so many replicas. The week that the baseline sums up is backfilled: what the rules have recorded in the first
minutes, once every five minutes for seven days.
"""

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from prometheus_client import generate_latest

sys.path.insert(0, str(Path(__file__).parent.parent))
from realengine import free_port, get, until
from replay import Replica

from exporter.simulator import EngineConfig, OpenLoop, Segment

RULES = Path(__file__).parent.parent.parent / "deploy/rules"
SCRAPE_SECONDS = 30
WEEK = 7 * 86400
STEP = 300
SLOWEST = 20  # rules that are printed
RECORDED = "stopline:.*:(increase5m.*|(p99|mean|share)_calm_1d)"  # what is summed up, or compared, over days


def pages(scrapes: int) -> list[bytes]:
    """A sidecar's page at each of so many scrapes, from the end of its warm-up on: traffic from calm to busy."""
    replica = Replica("r", EngineConfig.hy3_h20())
    seconds = scrapes * SCRAPE_SECONDS
    replica.set_load(OpenLoop(Segment(seconds + 600, 0.1, 2.5), seed=1))
    replica.run(600)
    found = []
    for _ in range(scrapes):
        replica.run(SCRAPE_SECONDS)
        found.append(generate_latest(replica.sidecar.registry))
    return found


def app(found: list[bytes]) -> web.Application:
    """Serves the page whose turn it is; the last one from then on."""
    began = time.monotonic()

    async def page(_: web.Request) -> web.Response:
        turn = int((time.monotonic() - began) / SCRAPE_SECONDS)
        return web.Response(body=found[min(turn, len(found) - 1)], content_type="text/plain")

    application = web.Application()
    application.router.add_get("/metrics", page)
    return application


class Prometheus:
    """Debian's, with the shipped rules, over a directory that outlives it."""

    def __init__(self, directory: Path, target: int, replicas: int) -> None:
        self.port, self._directory = free_port(), directory
        targets = [
            {"targets": [f"127.0.0.1:{target}"], "labels": {"__param_r": str(n), "pod": f"r{n}", "instance": f"r{n}"}}
            for n in range(replicas)
        ]
        (directory / "targets.json").write_text(json.dumps(targets))
        settings = {
            "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": "30s"},
            "rule_files": [str(RULES / "*.yaml")],
            "scrape_configs": [{"job_name": "stopline", "file_sd_configs": [{"files": ["targets.json"]}]}],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(settings))

    def __enter__(self) -> "Prometheus":
        command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=tsdb"]
        command += [f"--web.listen-address=127.0.0.1:{self.port}", "--storage.tsdb.retention.time=30d"]
        with (self._directory / "prometheus.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=self._directory, stdout=log, stderr=subprocess.STDOUT)
        until(lambda: get(f"http://127.0.0.1:{self.port}/-/ready"), 300, "Prometheus is ready")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(120)

    def query(self, expression: str) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.loads(answer.read())["data"]["result"]

    def evaluations(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds that the last evaluation took, of each group and of each rule."""
        groups = json.loads(get(f"http://127.0.0.1:{self.port}/api/v1/rules"))["data"]["groups"]
        rules = (rule for group in groups for rule in group["rules"])
        return {group["name"]: group["evaluationTime"] for group in groups}, _sums(rules)

    @property
    def resident_bytes(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0]) * 1024


def _sums(rules: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Of rules of one name together."""
    found: dict[str, float] = {}
    for rule in rules:
        found[rule["name"]] = found.get(rule["name"], 0.0) + rule["evaluationTime"]
    return found


def week(recorded: list[dict[str, Any]], now: float) -> Iterator[str]:
    """What was recorded as an increase, over the week before, in OpenMetrics."""
    by_name: dict[str, list[str]] = {}
    for each in recorded:
        labels = dict(each["metric"])
        name = labels.pop("__name__")
        text = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        value = each["value"][1]
        lines = by_name.setdefault(name, [])
        begin = now - WEEK
        lines += [f"{name}{{{text}}} {value} {begin + n * STEP:.0f}" for n in range((WEEK - 7200) // STEP)]
    for name, lines in by_name.items():
        yield f"# TYPE {name} gauge"
        yield from lines
    yield "# EOF"


def backfill(recorded: list[dict[str, Any]], directory: Path) -> None:
    """A week of what was *recorded*, into the storage of a Prometheus that does not run."""
    path = directory / "week.txt"
    with path.open("w") as file:
        file.writelines(f"{line}\n" for line in week(recorded, time.time()))
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "--quiet", str(path), "tsdb"]
    subprocess.run(command, cwd=directory, check=True)


async def measure(found: list[bytes], replicas: int, minutes: float, directory: Path) -> dict[str, Any]:
    port = free_port()
    runner = web.AppRunner(app(found), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        with Prometheus(directory, port, replicas) as prometheus:
            await asyncio.sleep(minutes * 60)
            recorded = await asyncio.to_thread(prometheus.query, f'{{__name__=~"{RECORDED}"}}')
        await asyncio.to_thread(backfill, recorded, directory)
        with Prometheus(directory, port, replicas) as prometheus:
            await asyncio.sleep(minutes * 60)
            groups, rules = prometheus.evaluations()
            series = await asyncio.to_thread(prometheus.query, "count({__name__=~'.+'})")
            late = await asyncio.to_thread(prometheus.query, "sum(up)")
            return {
                "replicas": replicas,
                "up": float(late[0]["value"][1]) if late else 0,
                "page_bytes": len(found[-1]),
                "series": int(series[0]["value"][1]) if series else 0,
                "backfilled_series": len(recorded),
                "resident_gib": prometheus.resident_bytes / 2**30,
                "groups_seconds": groups,
                "rules_seconds": rules,
                "all_groups_seconds": sum(groups.values()),
            }
    finally:
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=6.0, help="before and after the backfill, at least 6")
    given = parser.parse_args()
    if given.minutes < 6:
        parser.error("--minutes must be at least 6: the slowest groups are evaluated every five minutes")
    found = pages(math.ceil((2 * given.minutes + 5) * 60 / SCRAPE_SECONDS))
    with tempfile.TemporaryDirectory(prefix="stopline-bench-") as directory:
        figures = asyncio.run(measure(found, given.replicas, given.minutes, Path(directory)))
    if given.json:
        print(json.dumps(figures, indent=2))
        return
    for which, most in (("groups_seconds", None), ("rules_seconds", SLOWEST)):
        for name, seconds in sorted(figures.pop(which).items(), key=lambda item: -item[1])[:most]:
            print(f"{name:80} {seconds:8.3f} s")
    for name, value in figures.items():
        print(f"{name:32} {value:10.3f}" if isinstance(value, float) else f"{name:32} {value:10}")


if __name__ == "__main__":
    main()
