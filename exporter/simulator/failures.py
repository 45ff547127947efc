"""What a failing vLLM logs: one failure, many lines.

After recorded failures of vLLM 0.32.0 (worker killed, core killed, exception in a worker) and, for what needs
a GPU, the messages of torch and NCCL.  In this order: the workers, the core with a dump of its state, the API
server, and then the same EngineDeadError once for each stream in flight (`stream_broken`).  A planned stop
prints that error too; only there the API server's `[shutdown]` lines come before it.
"""

from collections.abc import Iterator

from . import tracebacks
from .config import GIB, EngineConfig
from .lines import CORE, Line, api, bare, core, workers
from .records import Event, Gauges
from .startup import engine_config
from .tracebacks import ENGINE_DEAD, traceback_text


def failing(event: Event, config: EngineConfig, gauges: Gauges) -> Iterator[Line]:
    """Everything but the streams, for an *event* that kills."""
    if event == "engine_dead":
        yield from _core_killed(config)
    elif event == "timeout":
        yield from _core_failed(config, gauges, _timed_out())
    elif event in ("worker_dead", "collective"):
        yield from _worker_died(event, config)
        stack = tracebacks.BUSY_LOOP + tracebacks.RESPONSE + tracebacks.DEQUEUE + tracebacks.CANCELLED
        yield from _core_failed(config, gauges, traceback_text(stack, "RuntimeError: cancelled"))
    elif config.gpus == 1:
        stack = tracebacks.BUSY_LOOP + tracebacks.FORWARD
        yield from _core_failed(config, gauges, traceback_text(stack, _exception(event, config, 0)))
    else:
        yield from _workers_raised(event, config)
        yield from _core_failed(config, gauges, _worker_failed(event, config))
    yield output_handler_failed()


def output_handler_failed() -> Line:
    text = traceback_text(tracebacks.GET_OUTPUT, ENGINE_DEAD)
    return api("async_llm.py:906", f"AsyncLLM output_handler failed.\n{text}", "ERROR")


def stream_broken(path: str) -> Line:
    """For one request that had begun to stream."""
    chat = "chat" in path
    stack = tracebacks.CHAT_STREAM if chat else tracebacks.COMPLETION_STREAM
    text = traceback_text(stack + tracebacks.GENERATE + tracebacks.GET_OUTPUT, ENGINE_DEAD)
    kind = "chat completion" if chat else "completion"
    return api("serving.py:500", f"Error in {kind} stream generator.\n{text}", "ERROR")


def hanging() -> Line:
    """INFO, once a minute, while the core waits for a worker: the only sign of a hang."""
    return core(
        "shm_broadcast.py:681",
        "No available shared memory broadcast block found in 60 seconds. This typically happens when some "
        "processes are hanging or doing some time-consuming work (e.g. compilation, weight/kv cache "
        "quantization).",
    )


def _workers_raised(event: Event, config: EngineConfig) -> Iterator[Line]:
    for rank, worker in enumerate(workers(config)):
        stack = tracebacks.WORKER_CALL + tracebacks.FORWARD
        text = traceback_text(stack, _exception(event, config, rank))
        # Twice, for vLLM also adds the traceback to the exception as a note.
        text = f"WorkerProc hit an exception.\n{text}\n{text}\n"
        yield Line(worker, "ERROR", "multiproc_executor.py:1063", text)


def _worker_failed(event: Event, config: EngineConfig) -> str:
    message = _exception(event, config, 0).partition(": ")[2]
    return traceback_text(
        tracebacks.BUSY_LOOP + tracebacks.RESPONSE + tracebacks.WORKER_FAILED,
        f"RuntimeError: Worker failed with error '{message}', please check the stack trace above for the root cause",
    )


def _worker_died(event: Event, config: EngineConfig) -> Iterator[Line]:
    """Killed from outside, or (SIGABRT) by NCCL's watchdog, which speaks up on every rank."""
    if event == "collective":
        work = "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=262144, NumelOut=262144, Timeout(ms)=600000)"
        for rank in range(config.gpus):
            yield bare(
                f"[rank{rank}]:[E1130 07:26:24.448605222 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog "
                f"caught collective operation timeout: {work} ran for {600_000 + rank} milliseconds before "
                "timing out."
            )
        yield bare(
            "[rank0]:[E1130 07:26:24.448705222 ProcessGroupNCCL.cpp:730] [Rank 0] To avoid data "
            "inconsistency, we are taking the entire process down."
        )
    code = "-6" if event == "collective" else "None"
    died = f"Worker proc VllmWorker-0 died unexpectedly (exit code: {code}), shutting down executor."
    yield core("multiproc_executor.py:315", died, "ERROR")
    yield core("multiproc_executor.py:479", "[shutdown] Executor: waiting for worker exit count=0")
    yield core("multiproc_executor.py:486", "[shutdown] Executor: all workers exited gracefully")


def _core_failed(config: EngineConfig, gauges: Gauges, trace: str) -> Iterator[Line]:
    dump = f"Dumping input data for V1 LLM engine (v{config.version}) with config: {engine_config(config)}"
    yield core("dump_input.py:72", dump, "ERROR")
    scheduled = (
        "Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[], "
        f"total_num_scheduled_tokens={gauges.running}, scheduled_spec_decode_tokens={{}}, "
        "preempted_req_ids=[], num_invalid_spec_tokens=null)"
    )
    yield core("dump_input.py:79", scheduled, "ERROR")
    stats = (
        f"Dumping scheduler stats: SchedulerStats(num_running_reqs={gauges.running}, "
        f"num_waiting_reqs={gauges.waiting}, num_skipped_waiting_reqs=0, step_counter=0, current_wave=0, "
        f"kv_cache_usage={gauges.kv_usage}, iteration_details=None, spec_decoding_stats=None)"
    )
    yield core("dump_input.py:81", stats, "ERROR")
    yield core("core.py:1512", f"EngineCore encountered a fatal error.\n{trace}", "ERROR")


def _core_killed(config: EngineConfig) -> Iterator[Line]:
    yield api("utils.py:628", "[shutdown] Process manager: send sigterm to process EngineCore")
    for worker in workers(config):
        if worker != CORE:
            text = "Parent process exited, terminating worker queues"
            yield Line(worker, "INFO", "multiproc_executor.py:843", text)
    unexpected = "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
    yield api("core_client.py:817", unexpected, "WARNING")
    yield api("core_client.py:770", "[shutdown] MPClient: start timeout=default")
    yield api("core_client.py:777", "[shutdown] MPClient: complete")


def _timed_out() -> str:
    cause = traceback_text(tracebacks.DEQUEUE + tracebacks.TIMED_OUT, "TimeoutError")
    stack = tracebacks.BUSY_LOOP + tracebacks.RESPONSE + tracebacks.GAVE_UP
    return tracebacks.caused(cause, traceback_text(stack, "TimeoutError: RPC call to sample_tokens timed out."))


def _exception(event: Event, config: EngineConfig, rank: int) -> str:
    if event == "cuda":
        return (
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
            "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
            "below might be incorrect.\n"
            "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
        )
    total = config.gpu_memory_bytes / GIB
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU {rank} has a total "
        f"capacity of {total:.2f} GiB of which 312.44 MiB is free. Including non-PyTorch memory, this "
        f"process has {total - 0.31:.2f} GiB memory in use. Of the allocated memory {total - 2.6:.2f} GiB is "
        "allocated by PyTorch, and 211.18 MiB is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See "
        "documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
