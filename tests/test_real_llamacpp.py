"""llama.cpp's own server, driven at four levels of concurrency, with the sidecar beside it.

What this engine tells: running and waiting, tokens, finished requests, the time of steps. It tells neither how long a
request waited nor how long it took with the wait, so nothing is compared there.
"""

from pathlib import Path

import pytest
from load import agree, p50
from realengine import ENGINES, Page, Server, Watcher, ensure, free_port, until

SLOTS = 8
LEVELS = ((1, 8), (4, 24), (16, 48), (32, 64))
ATTEMPTS = 4
SEVERAL_POLLS = 5.0  # seconds of load at least, or a fast machine is done with a level before it is polled


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = ensure("llamacpp")
    port = free_port()
    log: Path = tmp_path_factory.mktemp("llamacpp") / "server.log"
    log.touch()
    command = [root / "venv/bin/python", ENGINES / "run_llamacpp.py", root / "tiny.gguf", "--port", str(port)]
    command += ["-np", str(SLOTS), "-c", "8192", "-t", "1"]
    with Server(command, port, log, PYTHONUNBUFFERED="1") as server:
        yield server


def drive(watcher: Watcher, server: Server, **options):
    return watcher.drive(server.url, "tiny", seed=options["concurrency"], **options)


def test_the_page_agrees_with_what_the_client_saw(server: Server) -> None:
    server.start(60)
    with Watcher("--engine-url", server.url, "--log", str(server.log), "--gpus", "none") as watcher:
        until(lambda: watcher.page()("engine_up") == 1, 10, "engine up")
        first = before = watcher.settled()
        assert before("engine_info", engine="llamacpp") == 1
        assert before("engine_limit", name="max_running_requests") == SLOTS
        for concurrency, requests in LEVELS:
            agreed = False
            for _ in range(ATTEMPTS):
                seen, most = drive(watcher, server, concurrency=concurrency, requests=requests, seconds=SEVERAL_POLLS)
                page = watcher.settled()
                check_counts(seen, before, page)
                agreed = agrees(concurrency, seen, most, before, page)
                before = page
                if agreed:
                    break
            assert agreed, f"gauges or the step differ from what the client saw, {ATTEMPTS} times"
        assert sum(before.all("errors_total").values()) == 0
        assert before("series_dropped_total") == first("series_dropped_total")
        server.stop(seconds=5)
        until(lambda: watcher.page()("engine_up") == 0, 10, "engine down")
        page = watcher.page()
        assert page.all("requests_running") == page.all("requests_waiting") == {}
        assert sum(page.all("errors_total").values()) == 0
        server.start(60)
        until(lambda: watcher.page()("engine_up") == 1, 10, "engine up again")
        drive(watcher, server, concurrency=4, requests=8)
        assert watcher.settled()("requests_total", outcome="ok") == before("requests_total", outcome="ok") + 8


def check_counts(seen, before: Page, page: Page) -> None:
    assert {s.status for s in seen} == {200}

    def grew(name: str, **labels: str) -> float:
        return page(name, **labels) - before(name, **labels)

    assert grew("requests_total", outcome="ok") == len(seen)
    assert grew("tokens_total", kind="prompt") == sum(s.prompt_tokens for s in seen)
    assert grew("tokens_total", kind="generation") == sum(s.generated_tokens for s in seen)
    assert grew("step_latency_seconds_count", phase="decode") == sum(s.generated_tokens for s in seen)


def agrees(concurrency: int, seen, most: dict[str, float], before: Page, page: Page) -> bool:
    """Whether gauges and the step are what the client saw; on a busy machine the client itself is late."""
    step = page.quantile(0.5, "step_latency_seconds", before, phase="decode")
    gaps = [s.between_tokens for s in seen]
    print(f"c={concurrency}: decode step P50 {step * 1000:.2f} ms, client between tokens {p50(gaps) * 1000:.2f} ms")
    running = most["requests_running"] == min(concurrency, SLOTS)
    waiting = most["requests_waiting"] == pytest.approx(max(0, concurrency - SLOTS), abs=1)
    return running and waiting and agree(step, gaps, apart=0.002)
