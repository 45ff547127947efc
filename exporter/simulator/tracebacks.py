"""Python tracebacks as a failing vLLM 0.32.0 prints them.

A stack is written here as `file:line function` and below it the code, the files below vllm/ unless they are
torch's.  Those of the core, the API server and the executor are from recorded failures; the model's own are
shortened.
"""

_SITE_PACKAGES = "/opt/venv/lib/python3.11/site-packages"

BUSY_LOOP = """\
v1/engine/core.py:1496 run_engine_core
    engine_core.run_busy_loop()
v1/fault_tolerance/engine_core_sentinel.py:178 run_with_fault_tolerance
    busy_loop_func(self)
v1/engine/core.py:1555 run_busy_loop
    self._process_engine_step()
v1/engine/core.py:1606 _process_engine_step
    outputs, model_executed = self.step_fn()
v1/engine/core.py:674 step
    model_output = future.result()
"""
RESPONSE = """\
v1/executor/multiproc_executor.py:99 result
    return super().result()
v1/executor/multiproc_executor.py:103 _wait_for_response
    response = self.aggregate(self.get_response())
"""
DEQUEUE = """\
v1/executor/multiproc_executor.py:440 get_response
    status, result = mq.dequeue(timeout=dequeue_timeout)
"""
CANCELLED = """\
distributed/device_communicators/shm_broadcast.py:867 acquire_read
    raise RuntimeError("cancelled")
"""
TIMED_OUT = """\
distributed/device_communicators/shm_broadcast.py:880 acquire_read
    raise TimeoutError
"""
GAVE_UP = """\
v1/executor/multiproc_executor.py:447 get_response
    raise TimeoutError(f"RPC call to {method} timed out.") from e
"""
WORKER_FAILED = """\
v1/executor/multiproc_executor.py:444 get_response
    raise RuntimeError(
"""
WORKER_CALL = """\
v1/executor/multiproc_executor.py:1055 _execute_worker_rpc
    output = func(*args, **kwargs)
"""
FORWARD = """\
v1/worker/gpu_worker.py:812 execute_model
    output = self.model_runner.execute_model(
torch/utils/_contextlib.py:124 decorate_context
    return func(*args, **kwargs)
v1/worker/gpu_model_runner.py:3711 execute_model
    model_output = self._model_forward(
torch/nn/modules/module.py:1789 _call_impl
    return forward_call(*args, **kwargs)
model_executor/layers/fused_moe/runner/moe_runner.py:737 forward
    result = self._forward_entry(
"""
GET_OUTPUT = """\
v1/engine/async_llm.py:849 output_handler
    outputs = await engine_core.get_output_async()
v1/engine/core_client.py:1235 get_output_async
    raise self._format_exception(outputs) from None
"""
COMPLETION_STREAM = """\
entrypoints/openai/completion/serving.py:306 completion_stream_generator
    async for prompt_idx, res in result_generator:
"""
CHAT_STREAM = """\
entrypoints/openai/chat_completion/serving.py:542 chat_completion_stream_generator
    async for res in result_generator:
"""
GENERATE = """\
v1/engine/async_llm.py:767 generate
    out = q.get_nowait() or await q.get()
v1/engine/output_processor.py:92 get
    raise output
"""

ENGINE_DEAD = (
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
    "See stack trace (above) for the root cause."
)


def traceback_text(stack: str, exception: str) -> str:
    """As Python 3.11 prints it, carets included."""
    lines = ["Traceback (most recent call last):"]
    for line in stack.splitlines():
        if line.startswith("    "):
            lines += [line, *_carets(line)]
        else:
            place, _, function = line.partition(" ")
            path, _, number = place.partition(":")
            package = "" if path.startswith("torch/") else "vllm/"
            lines.append(f'  File "{_SITE_PACKAGES}/{package}{path}", line {number}, in {function}')
    return "\n".join([*lines, exception])


def caused(cause: str, effect: str) -> str:
    return f"{cause}\n\nThe above exception was the direct cause of the following exception:\n\n{effect}"


def _carets(code: str) -> list[str]:
    """Marks the call where it is not the whole statement."""
    for keyword in (" or ", " = ", "return "):
        head, found, call = code.partition(keyword)
        if found:
            return [" " * len(head + found) + "^" * len(call)]
    return []
