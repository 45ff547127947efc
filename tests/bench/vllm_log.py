"""vLLM logs with a known content, for measuring: how many steps, errors and aborted requests are in them."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_WRITTEN = 20_000  # records at a time
_RECORDS_A_SECOND = 40  # errors of one kind are then more than ten seconds apart, and each is a failure of its own
_BEGAN = 1_767_225_600.0  # a New Year: vLLM's times have no year
_PROMPT = """
the a of to and in that it is was for on are with as at be this have from or had by not but what all were when we there
can an your which their said if do will each about how up out them then she many some so these would other into has more
CUDA memory ERROR error: timeout Traceback queue_wait_ms=12 connection reset
"""


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of a log's records.

    What is left tells nothing: two thirds are access lines, a tenth repeats a prompt in which errors are spoken of.
    """

    name: str
    told: float
    failed_every: int


MIXED = Mix("mixed, 18 % tell, 2 % errors", 0.185, 135)  # an error has 2.75 lines in the mean
SPARSE = Mix("sparse, 1 % tells", 0.008, 1350)
DENSE = Mix("dense, 90 % tell", 0.885, 135)


def write(path: Path, mix: Mix, megabytes: int) -> Counter[str]:
    """Write so many MiB of whole records to *path*; what is in them, as ``family{kind}``."""
    rng = random.Random(1)
    held: Counter[str] = Counter()
    records = _records(rng, mix, held)
    with path.open("w") as out:
        while out.tell() < megabytes << 20:
            out.writelines(next(records) for _ in range(_WRITTEN))
    return held


def _records(rng: random.Random, mix: Mix, held: Counter[str]) -> Iterator[str]:
    n = 0
    while True:
        n += 1
        at = time.strftime("%m-%d %H:%M:%S", time.gmtime(_BEGAN + n // _RECORDS_A_SECOND))
        if n % mix.failed_every == 0:
            kind, text = _failure(n // mix.failed_every, at)
            held[f"errors{{{kind}}}"] += 1
            yield text
        elif rng.random() < mix.told:
            yield _telling(rng, n, at, held)
        else:
            yield _silent(rng, n, at)


def _telling(rng: random.Random, n: int, at: str, held: Counter[str]) -> str:
    pick = rng.random()
    if pick < 0.85:
        context, generation = rng.choice(((0, n % 63 + 1),) * 8 + ((1, n % 63 + 1), (2, 0)))
        phase = "decode" if not context else "mixed" if generation else "prefill"
        held[f"steps{{{phase}}}"] += 1
        return (
            f"(APIServer pid=914) INFO {at} [loggers.py:199] Engine 000: Iteration({n}): {context} context requests, "
            f"{context * 43} context tokens, {generation} generation requests, {generation} generation tokens, "
            f"iteration elapsed time: {rng.uniform(5, 50):.2f} ms, GPU KV cache usage: 31.0%\n"
        )
    if pick < 0.95:
        return (
            f"(APIServer pid=914) INFO {at} [loggers.py:335] Engine 00{n % 2}: Avg prompt throughput: 410.3 tokens/s, "
            f"Avg generation throughput: 1612.4 tokens/s, Running: {n % 61} reqs, Waiting: {n % 7} reqs, GPU KV cache "
            f"usage: {n % 97}.5%, Prefix cache hit rate: 3.0%\n"
        )
    held["aborted"] += 1
    return f"(APIServer pid=914) INFO {at} [async_llm.py:700] Request cmpl-{n:032x} aborted.\n"


def _silent(rng: random.Random, n: int, at: str) -> str:
    pick = rng.random()
    if pick < 0.50:
        return f'INFO:     10.244.3.{n % 250}:{40000 + n % 20000} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    if pick < 0.65:
        return (
            f'INFO:     10.244.0.1:{40000 + n % 20000} - "GET {rng.choice(("/metrics", "/health"))} HTTP/1.1" 200 OK\n'
        )
    if pick < 0.90:
        return f"(APIServer pid=914) INFO {at} [async_llm.py:420] Added request cmpl-{n:032x}.\n"
    words = " ".join(rng.choices(_PROMPT.split(), k=rng.randrange(4, 60)))
    return (
        f"(APIServer pid=914) INFO {at} [logger.py:39] Received request cmpl-{n:032x}: prompt: '{words}', params: "
        "SamplingParams(n=1, temperature=0.7, top_p=1.0, seed=0, max_tokens=512), lora_request: None.\n"
    )


def _failure(n: int, at: str) -> tuple[str, str]:
    match n % 4:
        case 0:
            start = f"(Worker_TP{n % 8} pid=997) ERROR {at} [worker.py:12] "
            return "out_of_memory", f"{start}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        case 1:
            start = f"INFO:     10.244.3.7:{40000 + n % 20000} - "
            return "server_error", f'{start}"POST /v1/completions HTTP/1.1" 500 Internal Server Error\n'
        case 2:
            start = f"(EngineCore pid=956) ERROR {at} [core.py:812] "
            return "timeout", f"{start}RPC call to execute_model timed out.\n"
    start = f"(EngineCore pid=956) ERROR {at} [gpu_model_runner.py:1118] "
    block = (
        "Traceback (most recent call last):",
        '  File "/opt/vllm/vllm/v1/engine/core.py", line 1109, in run_engine_core',
        "    engine_core.run_busy_loop()",
        '  File "/opt/vllm/vllm/v1/worker/gpu_model_runner.py", line 2217, in execute_model',
        "    output = self.model(input_ids, positions)",
        "             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "CUDA kernel errors might be asynchronously reported at some other API call.",
    )
    return "cuda", "".join(f"{start}{line}\n" for line in block)
