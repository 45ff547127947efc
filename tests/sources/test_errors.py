"""What is a failure, of which kind, and how many lines are one."""

import itertools

import pytest
from harness import Reader

from exporter import catalog

TRACEBACK = """\
ERROR 11-30 06:14:43 [core.py:15] worker died
Traceback (most recent call last):
  File "a.py", line 1, in f
    x = y
    ~~^^^
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""


def test_a_traceback_followed_by_silence_is_one_failure_of_its_exceptions_kind() -> None:
    reader = Reader("vllm").feed(TRACEBACK)
    assert reader.errors == {}
    assert reader.settle().errors == {"out_of_memory": 1}
    assert reader.settle(600).errors == {"out_of_memory": 1}


def test_the_same_traceback_from_eight_ranks_in_one_second_is_one_failure() -> None:
    blocks = [
        [
            f"(Worker_TP{rank} pid={rank + 400}) ERROR 11-30 06:14:43 [w.py:9] {line}\n"
            for line in TRACEBACK.splitlines()[1:]
        ]
        for rank in range(8)
    ]
    interleaved = "".join(itertools.chain.from_iterable(zip(*blocks, strict=True)))
    assert Reader("vllm").feed(interleaved).settle().errors == {"out_of_memory": 1}
    assert Reader("vllm").feed("".join(map("".join, blocks))).settle().errors == {"out_of_memory": 1}
    assert Reader("vllm").feed(TRACEBACK * 8).settle().errors == {"out_of_memory": 1}


def test_raw_tracebacks_of_eight_ranks_that_mix_are_one_failure() -> None:
    lines = [line + "\n" for line in TRACEBACK.splitlines()[1:]]
    mixed = "".join(line * 8 for line in lines)
    assert Reader("vllm").feed(mixed).settle().errors == {"out_of_memory": 1}


def test_a_chain_of_exceptions_is_one_failure_of_the_cause() -> None:
    chain = TRACEBACK + (
        "\nDuring handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "b.py", line 2, in g\n'
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert Reader("vllm").feed(chain).settle().errors == {"out_of_memory": 1}


def test_a_traceback_split_over_reads_is_one_failure() -> None:
    for cut in range(1, len(TRACEBACK.splitlines())):
        lines = TRACEBACK.splitlines(keepends=True)
        reader = Reader("vllm").feed("".join(lines[:cut]))
        reader.clock.pass_(0.1)
        reader.lines.flush()
        reader.feed("".join(lines[cut:]))
        assert reader.settle().errors == {"out_of_memory": 1}, cut


def test_two_failures_apart_are_two_by_the_logs_own_clock() -> None:
    """A backlog is read within a moment; what lies minutes apart in the log is not one event."""
    line = "ERROR 11-30 06:{:02}:00 [core.py:15] CUDA error: unspecified launch failure\n"
    reader = Reader("vllm").feed("".join(line.format(minute) for minute in range(5))).settle()
    assert reader.errors == {"cuda": 5}


def test_after_the_engine_said_it_stops_nothing_counts_until_it_starts_again() -> None:
    stop = "(APIServer pid=1) INFO 11-30 06:34:09 [launcher.py:254] [shutdown] API server: shutdown triggered\n"
    dead = "(APIServer pid=1) ERROR 11-30 06:34:09 [async_llm.py:906] AsyncLLM output_handler failed.\n"
    start = "(APIServer pid=2) INFO 11-30 06:36:03 [api_utils.py:286] non-default args: {'port': 1}\n"
    reader = Reader("vllm").feed(stop + dead).settle()
    assert (reader.errors, reader.lifecycle.phase) == ({}, "stopping")
    reader.feed(start + dead.replace("06:34", "06:37")).settle()
    assert (reader.errors, reader.lifecycle.phase) == ({"engine_dead": 1}, "dead")


def test_an_engine_that_died_before_it_was_stopped_did_die() -> None:
    dead = "(APIServer pid=1) ERROR 11-30 06:34:09 [async_llm.py:906] AsyncLLM output_handler failed.\n"
    stop = "(APIServer pid=1) INFO 11-30 06:34:30 [launcher.py:254] [shutdown] API server: shutdown triggered\n"
    reader = Reader("vllm").feed(dead + stop).settle()
    assert (reader.errors, reader.lifecycle.phase) == ({"engine_dead": 1}, "stopping")


def test_what_follows_a_death_is_its_consequence_but_not_what_may_have_caused_it() -> None:
    dead = "(APIServer pid=1) ERROR 11-30 06:34:09 [async_llm.py:906] AsyncLLM output_handler failed.\n"
    later = (
        "(APIServer pid=1) ERROR 11-30 06:35:30 [async_llm.py:906] AsyncLLM output_handler failed.\n"
        'INFO:     127.0.0.1:4 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n'
        "(APIServer pid=1) ERROR 11-30 06:35:31 [serving.py:1] ConnectionResetError: [Errno 104] reset\n"
        "(Worker pid=9) ERROR 11-30 06:35:32 [w.py:1] torch.OutOfMemoryError: CUDA out of memory.\n"
    )
    assert Reader("vllm").feed(dead + later).settle().errors == {"engine_dead": 1, "out_of_memory": 1}


def test_every_answer_with_5xx_is_an_event_of_its_own() -> None:
    line = 'INFO:     127.0.0.1:4 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n'
    probe = 'INFO:     127.0.0.1:4 - "GET /metrics HTTP/1.1" 200 OK\n'
    assert Reader("vllm").feed((probe * 99 + line) * 7).settle().errors == {"server_error": 7}


def test_a_failed_request_and_its_traceback_are_one() -> None:
    text = (
        'INFO:     127.0.0.1:4 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n'
        "ERROR:    Exception in ASGI application\n"
        "Traceback (most recent call last):\n"
        '  File "x.py", line 1, in f\n'
        "KeyError: 'x'\n"
    )
    assert Reader("vllm").feed(text).settle().errors == {"server_error": 1}


@pytest.mark.parametrize("prompt", ["x\nERROR 11-30 06:14:43 [core.py:15] CUDA error: boom", "x\n" + TRACEBACK])
@pytest.mark.parametrize("end", ["', params: SamplingParams(n=1), lora_request: None.", "'"])
def test_a_prompt_with_a_raw_newline_cannot_forge_a_failure(prompt: str, end: str) -> None:
    echo = f"INFO 11-30 06:14:43 [logger.py:43] Received request r1: prompt: '{prompt}{end}\n"
    assert Reader("vllm").feed(echo).settle(0.5).errors == {}
    assert Reader("vllm").feed("(APIServer pid=7) " + echo).settle(0.5).errors == {}


FORGED = """\
(EngineCore pid=9) ERROR 11-30 06:14:50 [core.py:15] CUDA error: forged
(APIServer pid=7) INFO 11-30 06:34:09 [launcher.py:254] [shutdown] API server: shutdown triggered
(APIServer pid=7) INFO 11-30 07:26:03 [api_utils.py:286] non-default args: {'max_num_seqs': 999}
(APIServer pid=7) INFO 11-30 07:26:42 [loggers.py:199] Engine 000: Iteration(0): 1 context requests, 43 context tokens, 0 generation requests, 0 generation tokens, iteration elapsed time: 99999.0 ms, x
"""


def test_a_prompt_that_knows_every_process_and_the_whole_format_forges_nothing() -> None:
    known = "(EngineCore pid=9) ERROR 11-30 06:10:50 [core.py:15] NCCL error: real\n"
    echo = f"(APIServer pid=7) INFO 11-30 06:14:43 [logger.py:43] Received request r1: prompt: 'x\n{FORGED * 200}', params: SamplingParams(n=1), lora_request: None.\n"
    real = "(EngineCore pid=9) ERROR 11-30 06:15:50 [core.py:15] torch.OutOfMemoryError: CUDA out of memory.\n"
    reader = Reader("vllm").feed(known + echo + real).settle(0.5)
    assert reader.errors == {"collective": 1, "out_of_memory": 1}
    assert reader.lifecycle.phase != "stopping"
    assert "engine_limit{name=max_running_requests}" not in reader.told()
    assert not reader.store.histograms


def test_after_an_echo_that_never_ends_errors_count_again() -> None:
    echo = "(APIServer pid=7) INFO 11-30 06:14:43 [logger.py:43] Received request r1: prompt: 'x\n"
    real = "(EngineCore pid=9) ERROR 11-30 06:14:50 [core.py:15] CUDA error: real\n"
    assert Reader("vllm").feed(echo).settle(3.0).feed(real).settle().errors == {"cuda": 1}


def test_echoes_whose_end_is_not_known_any_more_do_not_hide_errors_for_long() -> None:
    """A new version writes the request line in another way: errors must not go unseen, and the drift is told."""
    echo = "(APIServer pid=7) INFO 11-30 06:14:43 [logger.py:43] Received request r1: prompt: 'x' and more\n"
    calm = "(EngineCore pid=9) INFO 11-30 06:14:50 [core.py:15] fine ERROR\n"
    real = "(EngineCore pid=9) ERROR 11-30 06:14:50 [core.py:15] CUDA error: real\n"
    reader = Reader("vllm").feed(calm)
    for _ in range(3):
        reader.feed(echo).settle(3.0).feed(calm)
    assert reader.feed(echo + real).settle().errors == {"cuda": 1}
    assert reader.store.counters[catalog.LOG_UNPARSED] == {("log",): 3}


def test_an_error_amid_lines_of_other_threads_is_still_one() -> None:
    text = (
        "2026-11-30 10:00:00 ERROR worker died\n"
        "Traceback (most recent call last):\n"
        "2026-11-30 10:00:00 INFO something else\n"
        '  File "a.py", line 1, in f\n'
        "2026-11-30 10:00:00 INFO something else\n"
        "torch.OutOfMemoryError: CUDA out of memory.\n"
        "2026-11-30 10:00:01 INFO request_id=1 queue_wait_ms=5\n"
    )
    reader = Reader("generic").feed(text).settle()
    assert reader.errors == {"out_of_memory": 1}
    assert reader.told()["request_queue_wait_seconds{model=}"] == pytest.approx(0.005)


def test_a_json_record_with_a_stack_is_one_failure() -> None:
    line = (
        '{"level":"ERROR","message":"request failed","exc_info":"Traceback (most recent call last):\\n'
        '  File \\"a.py\\", line 1, in f\\nConnectionResetError: [Errno 104] Connection reset by peer"}'
    )
    assert Reader("generic").feed(line).settle().errors == {"connection": 1}


def _wrapped(line: str, wrap: str) -> bytes:
    data = line.encode()
    if "process" in wrap:
        data = b"(Worker_TP1 pid=412) " + data
    if "colour" in wrap:
        data = data.replace(b"ERROR", b"\x1b[1;31mERROR\x1b[0m")
    if "crlf" in wrap:
        data += b"\r"
    if "cri" in wrap:
        half = len(data) // 2
        stamp = b"2026-01-01T00:00:00.123456789Z stderr "
        return stamp + b"P " + data[:half] + b"\n" + stamp + b"F " + data[half:] + b"\n"
    return data + b"\n"


LAYERS = [" ".join(c) for n in range(5) for c in itertools.combinations(("process", "colour", "crlf", "cri"), n)]


@pytest.mark.parametrize("wrap", LAYERS)
def test_a_failure_is_known_under_every_combination_of_layers(wrap: str) -> None:
    text = "ERROR 11-30 06:14:43 [core.py:15] CUDA error: device-side assert triggered"
    assert Reader("vllm").feed(_wrapped(text, wrap)).settle().errors == {"cuda": 1}
    calm = "INFO 11-30 06:14:43 [core.py:15] ERROR CUDA error: device-side assert triggered"
    assert Reader("vllm").feed(_wrapped(calm, wrap)).settle().errors == {}


def test_the_cause_that_another_process_told_before_the_death_counts_too() -> None:
    """The core's last record is judged only after the API server has told, stream by stream, that the core is dead."""
    trace = "Traceback (most recent call last):"
    dead = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)."
    records = (
        (
            "EngineCore pid=956",
            "core.py:1512",
            "fatal error.",
            trace,
            "TimeoutError: RPC call to sample_tokens timed out.",
        ),
        ("APIServer pid=914", "async_llm.py:906", "AsyncLLM output_handler failed.", trace, dead),
        ("APIServer pid=914", "serving.py:500", "Error in completion stream generator.", trace, dead),
    )
    text = "".join(
        f"({process}) ERROR 11-30 07:26:24 [{place}] {line}\n" for process, place, *lines in records for line in lines
    )
    assert Reader("vllm").feed(text).settle().errors == {"timeout": 1, "engine_dead": 1}
