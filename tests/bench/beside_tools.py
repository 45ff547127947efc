#!/usr/bin/env python3
"""`stopline ramp` beside hey and `vllm bench serve`, on the same server in the same run: throughput, P50 and P99.

    make bench-tools                             # the simulated server, a real llama.cpp and a real vLLM
    python tests/bench/beside_tools.py llamacpp  # one of them; Markdown on standard output

At the same time, so that whatever else the machine does meets both alike: the one that is up first begins as soon as
the server has the other's requests, and each has as many clients and makes as many requests. Each figure is the median
of the rounds. hey (Debian package) and ramp send the same body, not streamed; `vllm bench serve` and ramp stream answers of the same
length to other prompts. What a tool differs from itself between its rounds is told too.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from realengine import ENGINES, Server, ensure, free_port, vllm

from exporter.load import imports, table
from exporter.load.result import Level
from exporter.simulator import EngineConfig, Simulation, serve

TOKENS = 16
BUSY = r"""until curl -sf {url}/metrics | grep -qE '^(vllm:num_requests_running|llamacpp:requests_processing)\b.* [1-9]'
do sleep 0.1; done"""
LONGEST = 240  # seconds for one run of one tool


@contextmanager
def simulator(folder: Path) -> Iterator[tuple[str, str]]:
    ready, ended = threading.Event(), threading.Event()
    told: list[str] = []

    async def run() -> None:
        config = EngineConfig.tiny(kv_blocks=8192, kv_bytes_per_token=2**15)
        async with serve(Simulation(config, seed=1)) as url:
            told.append(url)
            ready.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    ready.wait(10)
    yield told[0], "tiny"
    ended.set()
    thread.join()


@contextmanager
def llamacpp(folder: Path) -> Iterator[tuple[str, str]]:
    root, port, log = ensure("llamacpp"), free_port(), folder / "server.log"
    command = [root / "venv/bin/python", ENGINES / "run_llamacpp.py", root / "tiny.gguf", "--port", str(port)]
    with Server([*command, "-np", "8", "-c", "8192", "-t", "1"], port, log, PYTHONUNBUFFERED="1") as server:
        server.start(120)
        yield server.url, "tiny"


@contextmanager
def real_vllm(folder: Path) -> Iterator[tuple[str, str]]:
    with vllm(folder / "server.log") as server:
        server.start(240)
        yield server.url, "hy3"


SERVERS = {"simulator": simulator, "llamacpp": llamacpp, "vllm": real_vllm}


def ramp(url: str, concurrency: int, requests: int, folder: Path, *options: str | Path) -> Level:
    out = folder / "ramp.json"
    command = [sys.executable, "-m", "exporter", "ramp", "--url", url, "--levels", str(concurrency), "--out", str(out)]
    command += ["--requests", str(requests), "--max-seconds", str(LONGEST), "--baselines", "1"]
    command += ["--warm-up", "2", "--pause", "0", *map(str, options)]
    subprocess.run(command, check=False, capture_output=True, timeout=LONGEST + 60)
    return imports.read(str(out))[0][1].levels[0]


def hey(url: str, concurrency: int, requests: int, folder: Path, body: Path) -> Level:
    subprocess.run(["bash", "-c", BUSY.format(url=url)], check=True, timeout=LONGEST)
    command = ["hey", "-n", str(requests), "-c", str(concurrency), "-t", "60", "-m", "POST", "-T", "application/json"]
    text = subprocess.run(
        [*command, "-D", str(body), "-o", "csv", f"{url}/v1/completions"],
        check=True,
        capture_output=True,
        timeout=LONGEST,
    ).stdout
    (folder / "hey.csv").write_bytes(text)
    return imports.read(f"{folder / 'hey.csv'}@concurrency={concurrency}")[0][1].levels[0]


def bench_serve(model: str, url: str, concurrency: int, requests: int, folder: Path) -> Level:
    root, out = ensure("vllm"), folder / "vllm.json"
    command = [root / "venv/bin/vllm", "bench", "serve", "--backend", "openai", "--base-url", url, "--model", model]
    command += ["--tokenizer", root / "tiny-hy3", "--dataset-name", "random", "--random-input-len", str(TOKENS)]
    command += ["--random-output-len", str(TOKENS), "--ignore-eos", "--num-prompts", str(requests)]
    command += ["--max-concurrency", str(concurrency), "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result"]
    command += ["--result-filename", out, "--num-warmups", str(concurrency), "--disable-tqdm"]
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    subprocess.run([str(c) for c in command], check=True, capture_output=True, timeout=LONGEST, env=os.environ | quiet)
    return imports.read(str(out))[0][1].levels[0]


def words(url: str, model: str) -> int:
    """How many of our words make as many tokens as the other tool's prompts have."""
    from exporter.load.mix import Lengths, Mix

    (body,) = Mix(model=model, input_tokens=Lengths(64, 64), output_tokens=Lengths(1, 1), stream=False).bodies(1, "")
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    tokens = json.load(urllib.request.urlopen(request, timeout=60))["usage"]["prompt_tokens"]
    return max(round(TOKENS * 64 / tokens), 1)


def together(other: Callable[[], Level], ours: Callable[[], Level]) -> tuple[Level, Level]:
    """What both measured at once."""
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(other)
        mine = ours()
        return theirs.result(), mine


def rounds(
    name: str, levels: list[int], requests: int, count: int, beside: list[str], folder: Path
) -> Iterator[tuple[str, int, Level]]:
    """Tool, concurrency and what it measured, again and again."""
    with SERVERS[name](folder) as (url, model):
        body = folder / "body.json"
        given: dict[str, Any] = {"model": model, "prompt": "step queue token", "max_tokens": TOKENS, "ignore_eos": True}
        body.write_text(json.dumps(given | {"temperature": 0}))
        late = ("--input-tokens", str(words(url, model)), "--output-tokens", str(TOKENS))
        late += ("--reset", BUSY.format(url=url))
        for concurrency in levels:
            size = url, concurrency, requests, folder
            for _ in range(count):
                if "hey" in beside:
                    theirs, ours = together(partial(hey, *size, body), partial(ramp, *size, "--body", body))
                    yield from (("hey", concurrency, theirs), ("ramp, not streamed", concurrency, ours))
                if "vllm" in beside:
                    theirs, ours = together(partial(bench_serve, model, *size), partial(ramp, *size, *late))
                    yield from (("vllm bench serve", concurrency, theirs), ("ramp, streamed", concurrency, ours))


FIGURES = ("requests_per_second", "p50", "p99")
TOOLS = ("hey", "ramp, not streamed", "vllm bench serve", "ramp, streamed")


def rows(name: str, found: list[tuple[str, int, Level]]) -> Iterator[tuple[str, ...]]:
    for concurrency in sorted({c for _, c, _ in found}):
        before: list[float] = []
        for tool in [tool for tool in TOOLS if any(t == tool for t, _, _ in found)]:
            levels = [level for t, c, level in found if (t, c) == (tool, concurrency)]
            series = [[_figure(level, figure) for level in levels] for figure in FIGURES]
            now = [statistics.median(values) for values in series]
            apart = [(max(v) - min(v)) / statistics.median(v) for v in series]
            beside = [table.change((a - b) / b) for a, b in zip(now, before, strict=True)] if before else ["", "", ""]
            before = now if tool in ("hey", "vllm bench serve") else []
            cost = [level.client.cpu_share for level in levels if level.client is not None]
            yield (
                name, str(concurrency), tool, f"{now[0]:.2f}", table.time(now[1]), table.time(now[2]), *beside,
                " / ".join(table.share(a) for a in apart), table.share(max(cost)) if cost else "",
            )  # fmt: skip


def _figure(level: Level, figure: str) -> float:
    value = level.requests_per_second if figure == "requests_per_second" else getattr(level.latency, figure)
    assert value is not None
    return float(value)


HEADER = (
    *("server", "clients of each", "tool", "req/s", "P50", "P99", "Δ req/s", "Δ P50", "Δ P99"),
    *("between its rounds", "client's CPU, of a core"),
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", choices=[*SERVERS, "all"], default="all")
    parser.add_argument("--levels", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", nargs="*", choices=["hey", "vllm"], default=["hey", "vllm"])
    arguments = parser.parse_args()
    if shutil.which("hey") is None:
        sys.exit("hey is missing: apt-get install hey")
    for line in table.markdown(HEADER, [])[:2]:
        print(line, flush=True)
    for server in SERVERS if "all" in arguments.servers else arguments.servers:
        began, all_of_it = time.monotonic(), []
        with tempfile.TemporaryDirectory() as directory:
            settings = arguments.levels, arguments.requests, arguments.rounds, arguments.beside
            for one in rounds(server, *settings, Path(directory)):
                all_of_it.append(one)
                print(f"{time.monotonic() - began:.0f} s: {one[0]} at {one[1]}", file=sys.stderr)
        for line in table.markdown(HEADER, list(rows(server, all_of_it)))[2:]:
            print(line, flush=True)
