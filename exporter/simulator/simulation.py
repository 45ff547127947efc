"""The simulated server in real time: an engine driven by a clock, with its page, its log and a load.

The clock slips rather than starve the event loop: however long a turn took, the next one makes up for at most
LONGEST_TURN_SECONDS of it.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TextIO

from .config import EngineConfig
from .engine import Engine
from .load import Load
from .log import Log, LogOptions
from .metrics import Page
from .records import Observer, Request, RequestRecord

LONGEST_TURN_SECONDS = 0.25
SHORTEST_PAUSE_SECONDS = 0.001
LONGEST_PAUSE_SECONDS = 0.1


class Answer:
    """One request under way: wait for its tokens, then look at the record."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self._tokens = 0
        self._news = asyncio.Event()

    def tell(self, tokens: int = 0) -> None:
        """Of so many more tokens, or with none of its end."""
        self._tokens += tokens
        self._news.set()

    async def tokens(self) -> AsyncIterator[None]:
        """One item a token, until the request has ended."""
        while self._tokens or self.record.finished is None:
            if self._tokens:
                self._tokens -= 1
                yield
            else:
                await self._news.wait()
                self._news.clear()


class Simulation(Observer):
    """Runs *speed* times as fast as *clock*, a monotonic one in seconds.

    The log goes to a text file object, or is appended to a path, a whole event at a time; without one there
    is none.  *epoch* is the Unix time of the start.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        seed: int = 0,
        speed: float = 1.0,
        log: TextIO | Path | None = None,
        log_options: LogOptions | None = None,
        epoch: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        started = time.time() if epoch is None else epoch
        self.engine = Engine(config, seed)
        self.page = Page(self.engine, started)
        self._file = log.open("a", encoding="utf-8") if isinstance(log, Path) else log
        self._owns_file = isinstance(log, Path)
        self.log = Log(self.engine, self._write, log_options, started)
        self._clock, self._speed = clock, speed
        self._last_turn = clock()
        self._submitted = asyncio.Event()
        self._answers: dict[str, Answer] = {}
        self._load: Load | None = None
        self.engine.attach(self)

    async def run(self) -> None:
        """Keep the engine's clock going until cancelled."""
        while True:
            self.catch_up()
            pause = (self.engine.next_event - self.engine.now) / self._speed
            pause = min(max(pause, SHORTEST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):  # wait_for() of Python 3.11 loses a cancellation at times
                    await self._submitted.wait()
            self._submitted.clear()

    def catch_up(self) -> None:
        """Bring the engine to the present."""
        now = self._clock()
        elapsed = min(now - self._last_turn, LONGEST_TURN_SECONDS)
        self._last_turn = now
        self.engine.advance(self.engine.now + elapsed * self._speed)

    def submit(self, request: Request) -> Answer:
        self.catch_up()
        answer = Answer(self.engine.submit(request))
        if answer.record.finished is None:
            self._answers[answer.record.id] = answer
        self._submitted.set()
        return answer

    def abort(self, answer: Answer) -> None:
        """The client went away; nothing happens if it was answered already."""
        self.catch_up()
        self.engine.abort(answer.record.id)

    def set_load(self, load: Load | None) -> None:
        """Replace the load by another one, or by none; it goes on asking through failures and restarts."""
        if self._load is not None:
            self._load.stop()
        self._load = load
        if load is not None:
            self.catch_up()
            load.start(self.engine)
            self._submitted.set()

    def answered(self, client: str, method: str, path: str, status: int, *, counted: bool = True) -> None:
        """An answer that was no request to the engine: log it, and count it where vLLM does."""
        self.log.access(client, method, path, status)
        if counted:
            self.page.count_http(path, status, method)

    @property
    def gpu_memory_used_bytes(self) -> list[int]:
        """By GPU."""
        return [self.engine.gpu_memory_used_bytes] * self.engine.config.gpus

    def close(self) -> None:
        if self._owns_file and self._file is not None:
            self._file.close()

    def on_tokens(self, records: Sequence[RequestRecord], gaps: Sequence[float]) -> None:
        for record in records:
            if answer := self._answers.get(record.id):
                answer.tell(1)

    def on_finish(self, record: RequestRecord) -> None:
        if answer := self._answers.pop(record.id, None):
            answer.tell()

    def _write(self, text: str) -> None:
        if self._file is not None:
            self._file.write(text)
            self._file.flush()
