"""vLLM with two ranks on the CPU, and with too little KV cache: layout, preemption, a lost worker, a start that fails.

The model is dense: vLLM's CPU build cannot split a mixture of experts. Run by ``make test-engine``.
"""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest
from load import closed_loop, drive
from realengine import VLLM_SLOTS, Page, Server, Watcher, get, until, vllm

pytestmark = pytest.mark.engine

BLOCKS, BLOCK_TOKENS = 20, 32


@pytest.fixture
def start(tmp_path: Path):
    """Starts ``vllm serve`` with further arguments, and Stopline beside it before the first line is logged."""
    stack = []

    def begin(*arguments: str, seconds: float = 0) -> tuple[Server, Watcher]:
        dense = {"model": "tiny-llama", "name": "tiny"}
        try:
            server = vllm(tmp_path / "server.log", "--block-size", str(BLOCK_TOKENS), *arguments, **dense)
        except subprocess.CalledProcessError as error:
            pytest.fail(f"vLLM cannot be installed here: {error}")
        watcher = Watcher("--engine-url", server.url, "--log", str(server.log), "--gpus", "none")
        for context in (watcher, server):
            stack.append(context)
            context.__enter__()
        if seconds:
            server.start(seconds)
            until(lambda: watcher.page()("engine_up") == 1, 20, "engine up")
        return server, watcher

    yield begin
    while stack:
        stack.pop().__exit__(None, None, None)


def native(server: Server, name: str) -> float:
    """The sum of a counter on vLLM's own page."""
    lines = (line for line in get(server.url + "/metrics").splitlines() if line.startswith(name + "{"))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def load(server: Server, **options):
    return asyncio.run(closed_loop(server.url, "tiny", words=20, **options))


def check_totals(server: Server, seen, before: Page, page: Page) -> None:
    """Every request and token once, whichever rank had it."""
    assert {s.status for s in seen} == {200}

    def grew(name: str, **labels: str) -> float:
        return page(name, **labels) - before(name, **labels)

    assert grew("requests_total", outcome="ok") == grew("request_latency_seconds_count") == len(seen)
    assert grew("tokens_total", kind="generation") == sum(s.generated_tokens for s in seen)
    assert grew("tokens_total", kind="prompt") == sum(s.prompt_tokens for s in seen)


def test_tensor_parallel_preemption_and_a_lost_worker(start) -> None:
    server, watcher = start("--tensor-parallel-size", "2", "--num-gpu-blocks-override", str(BLOCKS), seconds=240)
    before = watcher.settled()
    assert before.labelled("parallelism", "dimension") == {"tensor": 2, "pipeline": 1, "data": 1}
    assert before("kv_cache_capacity_tokens") == BLOCKS * BLOCK_TOKENS
    assert before("engine_info", engine="vllm", version="0.32.0", model="tiny", dtype="float32") == 1

    seen = load(server, concurrency=VLLM_SLOTS, requests=12, tokens=256)
    page = watcher.settled()
    check_totals(server, seen, before, page)
    assert page("preemptions_total") == native(server, "vllm:num_preemptions_total") > 0
    assert page.errors() == {}

    async def drive_and_kill() -> None:
        running = asyncio.create_task(
            closed_loop(server.url, "tiny", concurrency=4, requests=4, seconds=30, tokens=256)
        )
        # Not by its gauge, which on a fast machine is 0 at nearly every look: those that run end together.
        done = page("requests_total", outcome="ok")
        more = lambda: watcher.page()("requests_total", outcome="ok") > done  # noqa: E731
        await asyncio.to_thread(until, more, 20, "requests end")
        workers = [pid for pid, command in server.children().items() if "Worker" in command]
        assert len(workers) == 2, server.children()
        os.kill(workers[1], signal.SIGKILL)
        await running

    asyncio.run(drive_and_kill())
    until(lambda: watcher.page()("engine_up") == 0, 30, "engine down")
    until(lambda: watcher.page().errors() == {"engine_dead": 1.0}, 30, "one failure")
    assert watcher.page()("engine_phase", state="dead") == 1


def test_data_parallel_ranks_each_count_for_themselves(start) -> None:
    server, watcher = start("--data-parallel-size", "2", seconds=300)
    load(server, concurrency=4, requests=8, tokens=8)  # with several API processes there is no gauge before
    until(lambda: set(watcher.page().labelled("requests_running", "rank")) == {"0", "1"}, 20, "both ranks' gauges")
    before = watcher.settled()
    assert before("parallelism", dimension="data") == 2
    seen = asyncio.run(drive(server.url, "tiny", concurrency=8, requests=24, words=20, tokens=128))
    page = watcher.settled()
    check_totals(server, seen, before, page)
    # how much each has is not asked: with several API processes vLLM's own gauges read 0 at times under load
    assert set(page.labelled("requests_running", "rank")) == {"0", "1"}
    assert page.errors() == {}


def test_a_start_without_room_for_one_request_is_told(start) -> None:
    server, watcher = start("--num-gpu-blocks-override", "8")
    with pytest.raises(AssertionError):  # it ends before it is healthy
        server.start(120)
    assert "To serve at least one request with the model's max seq len" in server.log.read_text()
    until(lambda: watcher.page().errors() == {"kv_cache": 1, "engine_dead": 1}, 10, "both failures")
    page = watcher.page()
    assert page("engine_up") == 0
    assert page("requests_total") == 0
