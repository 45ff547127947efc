"""A small closed-loop load against an OpenAI-compatible server on loopback, with what the client saw of each request.

Runs as a process of its own (``drive``), so that nothing a test does meanwhile delays what it measures.
"""

import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field

import aiohttp

_WORDS = [
    "step",
    "queue",
    "token",
    "cache",
    "expert",
    "router",
    "batch",
    "prefill",
    "decode",
    "memory",
    "latency",
    "engine",
    "request",
    "answer",
]


@dataclass(slots=True)
class Seen:
    """One request as the client saw it; times in seconds, tokens as the server said in its last chunk."""

    status: int
    latency: float
    first_token: float = 0.0
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0

    @property
    def between_tokens(self) -> float:
        """Mean time between tokens; a token need not make a chunk, as it may be half a character."""
        return (self.chunks[-1] - self.chunks[0]) / (self.generated_tokens - 1)


async def one(
    session: aiohttp.ClientSession, url: str, model: str, rng: random.Random, *, words: int, tokens: int
) -> Seen:
    """One streamed completion."""
    body = {
        "model": model,
        "prompt": " ".join(rng.choice(_WORDS) for _ in range(words)),
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    seen = Seen(0, 0.0)
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            seen.status = response.status
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if usage := chunk.get("usage"):
                    seen.prompt_tokens = usage["prompt_tokens"]
                    seen.generated_tokens = usage["completion_tokens"]
                if chunk.get("choices"):
                    seen.chunks.append(time.perf_counter() - began)
    except (aiohttp.ClientError, TimeoutError):
        seen.status = 0
    seen.latency = time.perf_counter() - began
    seen.first_token = seen.chunks[0] if seen.chunks else 0.0
    return seen


async def closed_loop(
    url: str,
    model: str,
    *,
    concurrency: int,
    requests: int,
    seconds: float = 0.0,
    words: int = 8,
    tokens: int = 32,
    seed: int = 0,
) -> list[Seen]:
    """*requests* requests, *concurrency* at a time, and further ones until *seconds* have passed; ends by itself."""
    end = time.perf_counter() + seconds
    todo = itertools.takewhile(lambda n: n < requests or time.perf_counter() < end, itertools.count())
    seen: list[Seen] = []

    async def worker(number: int, session: aiohttp.ClientSession) -> None:
        rng = random.Random(seed * 1000 + number)
        seen.extend([await one(session, url, model, rng, words=words, tokens=tokens) for _ in todo])

    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # some servers close after a stream
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(worker(n, session) for n in range(concurrency)))
    return seen


def p50(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


def agree(median: float, values: list[float], *, apart: float = 0.0) -> bool:
    """Whether *median* is that of *values* within 10 % (or *apart*), give or take five ranks in a hundred.

    Requests of equal length run in lockstep: their times come in clusters, and the median jumps between two.
    """
    ranks = statistics.quantiles(values, n=20)
    return min(0.9 * ranks[8], ranks[8] - apart) <= median <= max(1.1 * ranks[10], ranks[10] + apart)


async def drive(url: str, model: str, watch=None, **options) -> list[Seen]:
    """``closed_loop`` with *options* in another process; *watch* is called twice a second until it has ended."""
    arguments = json.dumps({"url": url, "model": model, **options})
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, arguments, stdout=asyncio.subprocess.PIPE)
    output = asyncio.create_task(process.communicate())
    while not output.done():
        if watch is not None:
            await asyncio.to_thread(watch)
        await asyncio.wait([output], timeout=0.5)
    return [Seen(**seen) for seen in json.loads((await output)[0])]


if __name__ == "__main__":
    print(json.dumps([asdict(seen) for seen in asyncio.run(closed_loop(**json.loads(sys.argv[1])))]))
