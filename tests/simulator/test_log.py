"""The lines against the shapes of a real vLLM's."""

import re

import pytest

from exporter.simulator import Engine, EngineConfig, Log, LogOptions, Poisson, Request
from exporter.simulator.load import fixed, requests

# From the captures of vLLM 0.32.0, with a GPU's word for the cache.
PREFIX = r"\((?P<process>\w+) pid=\d+\) (?P<level>INFO|WARNING|ERROR|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[\w+\.py:\d+\] "
STATS = (
    r"Engine 000: Avg prompt throughput: (\d+\.\d) tokens/s, Avg generation throughput: (\d+\.\d) tokens/s, "
    r"Running: (\d+) reqs, Waiting: (\d+) reqs, GPU KV cache usage: (\d+\.\d)%, Prefix cache hit rate: 0.0%$"
)
ITERATION = (
    r"Engine 000: Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens, iteration elapsed time: (\d+\.\d\d) ms, GPU KV cache usage: (\d+\.\d)%$"
)
ACCESS = r'INFO:     127\.0\.0\.1:\d+ - "POST /v1/completions HTTP/1\.1" (\d+) [A-Z][A-Za-z ]+$'
RECEIVED = r"Received request (cmpl-[0-9a-f]{16}-0): params: SamplingParams\(n=1, .*\), lora_request: None\.$"
ADDED = r"Added request (cmpl-[0-9a-f]{16}-0)-[0-9a-f]{8}\.$"

ENGINE_DEAD = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."


class Server:
    """An engine and its log from the start on."""

    def __init__(self, config: EngineConfig | None = None, **options) -> None:
        self.engine = Engine(config or EngineConfig.tiny())
        self._written: list[str] = []
        self.log = Log(self.engine, self._written.append, LogOptions(**options), epoch=1_796_023_551)
        self._seen = 0

    @property
    def lines(self) -> list[str]:
        return "".join(self._written).splitlines()

    def new_lines(self) -> list[str]:
        lines = self.lines[self._seen :]
        self._seen += len(lines)
        return lines

    def ask(self, **changes):
        return self.engine.submit(Request(**({"prompt_tokens": 40, "output_tokens": 64} | changes)))

    def matching(self, pattern: str) -> list[re.Match[str]]:
        return [found for line in self.lines if (found := re.search(pattern, line))]


def test_every_line_has_a_prefix_or_is_one_of_the_bare_kinds() -> None:
    server = Server(EngineConfig.hy3_h20(), requests=True, iterations=True, prompts=True)
    Poisson(3.0, seed=1).start(server.engine)
    server.engine.advance(30)
    server.engine.fail("collective")
    bare = [line for line in server.lines if not re.match(PREFIX, line)]
    assert len(bare) < len(server.lines)
    assert all(re.match(r"INFO:     |\[rank\d\]:\[E", line) for line in bare)


def test_start_tells_what_a_parser_reads() -> None:
    text = "\n".join(Server(EngineConfig.hy3_h20()).lines)
    for fact in (
        "non-default args: {'model_tag': '/models/hy3', ",
        "'tensor_parallel_size': 8, 'enable_expert_parallel': True, ",
        "'max_num_seqs': 64",
        "Initializing a V1 LLM engine (v0.32.0) with config: model='/models/hy3', ",
        "dtype=torch.bfloat16, max_seq_len=32768, ",
        "tensor_parallel_size=8, pipeline_parallel_size=1, data_parallel_size=1, ",
        "Chunked prefill is enabled with max_num_batched_tokens=2048.",
        "Model loading took 68.69 GiB memory and ",
        "Available KV cache memory: 15.23 GiB",
        "GPU KV cache size: 399,360 tokens, Maximum concurrency for 32,768 tokens per request: 12.19x",
        "[EP Rank 3/8] Expert parallelism is enabled. Expert placement strategy: linear. "
        "Local/global number of experts: 24/192. Experts local to global index map: 0->72, ",
        "rank 7 in world size 8 is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank 7, ETP rank 0, EP rank 7",
    ):
        assert fact in text
    assert text.endswith("INFO:     Application startup complete.")
    assert text.count("Model loading took") == 8


def test_dense_model_on_one_gpu_has_no_workers_and_no_experts() -> None:
    text = "\n".join(Server().lines)
    assert "Worker" not in text
    assert "Expert" not in text
    assert "EP rank N/A" in text


def test_stats_come_every_ten_seconds_while_something_goes_on_and_once_more() -> None:
    server = Server()
    server.engine.advance(40)
    assert server.matching(STATS) == []
    for _ in range(12):
        server.ask(output_tokens=400, prompt_tokens=60)
    server.engine.advance(100)
    found = [match.groups() for match in server.matching(PREFIX + STATS)]
    assert found[0][:2] == ("APIServer", "INFO")
    assert [float(groups[2]) for groups in found] == [72.0, 0.0]
    assert [float(groups[3]) for groups in found] == [480.0, 0.0]


def test_iteration_lines_tell_every_step() -> None:
    server = Server(iterations=True)
    server.ask(output_tokens=3)
    server.engine.advance(1)
    found = [match.groups()[:5] for match in server.matching(ITERATION)]
    assert found == [("0", "1", "40", "0", "0"), ("1", "0", "0", "1", "1"), ("2", "0", "0", "1", "1")]


def test_request_lines() -> None:
    server = Server(requests=True)
    record = server.ask(max_tokens=64)
    server.engine.advance(5)
    assert [match[1] for match in server.matching(RECEIVED)] == [record.id]
    assert [match[1] for match in server.matching(ADDED)] == [record.id]
    assert len(server.matching("max_tokens=64, ")) == 1


def test_without_the_option_there_are_only_access_lines() -> None:
    server = Server()
    server.new_lines()
    server.ask(stream=True, abort_after=0.1)
    server.ask(stream=False)
    server.ask(stream=False, abort_after=0.1)
    server.ask(prompt_tokens=600)
    server.engine.advance(5)
    assert [re.fullmatch(ACCESS, line)[1] for line in server.new_lines()] == ["200", "400", "200"]
    server = Server(access=False)
    server.new_lines()
    server.ask()
    assert server.new_lines() == []


def test_abort_lines() -> None:
    server = Server(requests=True)
    record = server.ask(abort_after=0.1)
    server.engine.advance(5)
    assert [m[1] for m in server.matching(r"Aborted request\(s\) (\S+)-[0-9a-f]{8}\.$")] == [record.id]
    assert [m[1] for m in server.matching(r"Request (\S+) aborted\.$")] == [record.id]


def test_prompt_reaches_the_log_escaped_and_on_an_info_like_line() -> None:
    server = Server(prompts=True)
    server.new_lines()
    server.ask(prompt="why CUDA out of memory?\nERROR connection reset by peer")
    first, *_ = server.new_lines()
    assert re.match(PREFIX, first)["level"] == "DEBUG"
    assert r"details: prompt: 'why CUDA out of memory?\nERROR connection reset by peer', " in first


def failure(fault, config: EngineConfig | None = None, streams: int = 3) -> list[str]:
    server = Server(config)
    for _ in range(streams):
        server.ask(output_tokens=400)
    server.engine.advance(1)
    server.new_lines()
    server.engine.fail(fault)
    return server.new_lines()


@pytest.mark.parametrize(
    ("fault", "root"),
    [
        ("out_of_memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has"),
        ("cuda", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
        ("collective", "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE"),
        ("timeout", "TimeoutError: RPC call to sample_tokens timed out."),
        ("engine_dead", "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"),
        ("worker_dead", "Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor."),
    ],
)
@pytest.mark.parametrize("config", [EngineConfig.hy3_h20(), EngineConfig.tiny()], ids=["hy3", "tiny"])
def test_failure_has_its_root_and_an_engine_dead_error_for_each_stream(fault, root, config) -> None:
    lines = failure(fault, config)
    text = "\n".join(lines)
    assert root in text
    assert text.count("AsyncLLM output_handler failed.") == 1
    assert text.count("Error in completion stream generator.") == 3
    assert text.count(ENGINE_DEAD) == 4
    assert "[shutdown] API server" not in text
    errors = [line for line in lines if re.match(PREFIX, line) and " ERROR " in line]
    assert len(errors) > 40


@pytest.mark.parametrize("fault", ["out_of_memory", "cuda"])
def test_each_rank_prints_its_traceback(fault) -> None:
    lines = failure(fault, EngineConfig.hy3_h20())
    hit = [re.match(PREFIX, line)["process"] for line in lines if "WorkerProc hit an exception." in line]
    assert hit == [f"Worker_TP{rank}_EP{rank}" for rank in range(8)]
    assert sum("RuntimeError: Worker failed with error '" in line for line in lines) == 1


def test_traceback_has_the_shape_of_a_real_one() -> None:
    lines = [re.sub(PREFIX, "", line) for line in failure("worker_dead")]
    begin = lines.index("EngineCore encountered a fatal error.")
    assert lines[begin + 1] == "Traceback (most recent call last):"
    site = "/opt/venv/lib/python3.11/site-packages"
    frame = lines.index(f'  File "{site}/vllm/v1/engine/core.py", line 1606, in _process_engine_step')
    assert lines[frame + 1 : frame + 3] == [
        "    outputs, model_executed = self.step_fn()",
        "                              ^^^^^^^^^^^^^^",
    ]
    assert "RuntimeError: cancelled" in lines


def test_chat_stream_and_plain_request_lost_to_a_failure() -> None:
    server = Server()
    server.ask(path="/v1/chat/completions")
    server.ask(stream=False)
    server.engine.advance(0.1)
    server.new_lines()
    server.engine.fail("engine_dead")
    lines = server.new_lines()
    assert sum("Error in chat completion stream generator." in line for line in lines) == 1
    assert [re.fullmatch(ACCESS, line)[1] for line in lines if line.startswith("INFO: ")] == ["500"]


def test_hang_says_so_at_info_once_a_minute_and_then_times_out() -> None:
    server = Server()
    server.ask(output_tokens=400)
    server.engine.advance(1)
    server.new_lines()
    server.engine.fail("hang")
    server.engine.advance(299)
    hints = [line for line in server.new_lines() if "No available shared memory broadcast block" in line]
    assert len(hints) == 4
    assert all(re.match(PREFIX, line)["level"] == "INFO" for line in hints)
    server.engine.advance(302)
    assert any("TimeoutError: RPC call to sample_tokens timed out." in line for line in server.new_lines())


def test_kv_small_and_preemptions_leave_no_line() -> None:
    server = Server()
    for _ in range(8):
        server.ask(prompt_tokens=100, output_tokens=100)
    server.engine.advance(0.5)
    server.new_lines()
    server.engine.fail("kv_small")
    server.engine.advance(5)
    assert server.new_lines() == []


def test_planned_stop_announces_itself_before_its_error() -> None:
    server = Server()
    server.ask(output_tokens=400)
    server.engine.advance(0.1)
    server.new_lines()
    server.engine.stop()
    lines = server.new_lines()
    assert lines[0].endswith("[launcher.py:254] [shutdown] API server: shutdown triggered")
    assert lines[-1] == "INFO:     Application shutdown complete."
    assert sum(ENGINE_DEAD in line for line in lines) == 1
    server.engine.advance(100)
    server.ask()
    assert server.new_lines() == []


def test_restart_prints_the_start_again() -> None:
    server = Server()
    server.engine.fail("cuda")
    server.new_lines()
    server.engine.restart()
    assert server.new_lines()[-1] == "INFO:     Application startup complete."


def test_time_of_the_lines_follows_the_engine() -> None:
    server = Server(requests=True)
    stamp = r" (\d\d):(\d\d):(\d\d) "
    first = re.search(stamp, server.lines[0])
    server.engine.advance(3661)
    Poisson(1.0, mix=requests(fixed(10), fixed(5))).start(server.engine)
    server.engine.advance(3670)
    then = next(iter(server.matching(r"Received request")))
    later = re.search(stamp, then.string)
    seconds = [int(m[1]) * 3600 + int(m[2]) * 60 + int(m[3]) for m in (first, later)]
    assert 3661 <= (seconds[1] - seconds[0]) % 86_400 <= 3670
