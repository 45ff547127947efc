"""A continuous-batching LLM engine in virtual time: what happens, and when, without any model or I/O.

Nothing here reads a clock or sleeps: `advance` runs the events up to a moment as fast as the CPU allows,
and the same seed and the same calls give the same run.  The order of things is vLLM's: the core takes what
arrived only between two steps, a step's tokens come out at its end, and so do the gauges (`published`).
"""

import heapq
import itertools
import random
from collections.abc import Callable
from functools import partial
from math import ceil, inf
from typing import Literal, get_args

from .config import EngineConfig
from .memory import GpuMemory
from .records import Event, FinishReason, Gauges, Observer, Request, RequestRecord, StepRecord
from .scheduler import Batch, Scheduler, Sequence

SCHEDULING_SECONDS = 30e-6  # between two steps; spans of a real vLLM: 17 to 45 us from queued to scheduled

State = Literal["serving", "hung", "dead", "stopped"]
FAULTS: tuple[Event, ...] = tuple(event for event in get_args(Event) if event not in ("stop", "start"))


class Engine:
    """`submit` requests, `advance` the clock, and let observers hear what happens.

    A callback may submit, abort or fail only through `call_at`, for the engine is amid something then.
    """

    def __init__(self, config: EngineConfig, seed: int = 0) -> None:
        self.config = config
        self.now = 0.0
        self._random = random.Random(seed)
        self._observers: list[Observer] = []
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._ticket = itertools.count()

        self._reset()

    def _reset(self) -> None:
        """A fresh process."""
        self.state: State = "serving"
        self.steps = 0  # ended
        self.published = Gauges()
        self._scheduler = Scheduler(self.config)
        self._memory = GpuMemory(self.config)
        self._live: dict[str, Sequence] = {}
        self._arrived: list[Sequence] = []  # since the step began: the core has not seen them yet
        self._step: tuple[StepRecord, Batch] | None = None  # under way
        self._wake = inf  # when that ends, or else the next one begins
        self._slowdown = 1.0
        self._pool_limit: int | None = None  # blocks, from the next step on

    # What it looks like from outside.

    @property
    def running(self) -> int:
        return self._scheduler.gauges.running

    @property
    def waiting(self) -> int:
        return self._scheduler.gauges.waiting + len(self._arrived)

    @property
    def in_flight(self) -> int:
        return len(self._live)

    @property
    def kv_usage(self) -> float:
        """Ratio 0..1 of the usable blocks."""
        return self._scheduler.gauges.kv_usage

    @property
    def gpu_memory_used_bytes(self) -> int:
        """On each GPU; a dead process holds nothing."""
        return self._memory.used(self.now) if self.state in ("serving", "hung") else 0

    @property
    def next_event(self) -> float:
        """The moment of the next one; infinity if nothing will happen by itself."""
        return min(self._wake, self._timers[0][0]) if self._timers else self._wake

    def attach(self, observer: Observer) -> None:
        self._observers.append(observer)

    # Time.

    def call_at(self, moment: float, callback: Callable[[], object]) -> None:
        """Run *callback* when the clock gets there; of one moment, in the order asked for, before a step."""
        heapq.heappush(self._timers, (max(moment, self.now), next(self._ticket), callback))

    def advance(self, until: float) -> None:
        """Let everything happen that happens up to and including *until*, then stand there."""
        if until < self.now:
            raise ValueError("time does not run backwards")
        while (moment := self.next_event) <= until:
            self.now = moment
            if self._timers and self._timers[0][0] <= self._wake:
                heapq.heappop(self._timers)[2]()
            elif self._step is None:
                self._begin_step()
            else:
                self._end_step(*self._step)
        self.now = until

    # Requests.

    def submit(self, request: Request) -> RequestRecord:
        """Hand in *request* now.  The record is already finished if it was refused."""
        room = self.config.max_model_len - request.prompt_tokens
        max_tokens = room if request.max_tokens is None else request.max_tokens
        prefix = "chatcmpl" if "chat" in request.path else "cmpl"
        identifier = f"{prefix}-{self._random.getrandbits(64):016x}-0"
        record = RequestRecord(request, identifier, self.config.model, max_tokens, arrival=self.now)
        limit = self.config.max_queued_requests
        if not 1 <= max_tokens <= room:
            self._close(record, "too_long")
        elif self.state in ("dead", "stopped"):
            self._close(record, "error")
        elif limit is not None and self.waiting >= limit:
            self._close(record, "queue_full")
        else:
            self._accept(record)
        return record

    def abort(self, identifier: str) -> None:
        """The client went away.  Nothing happens if the request is not in the engine."""
        if sequence := self._live.get(identifier):
            self._finish(sequence, "abort")
            if self._step is None:
                self.published = self._scheduler.gauges

    def _accept(self, record: RequestRecord) -> None:
        record.accepted = True
        sequence = self._live[record.id] = Sequence(record)
        self._arrived.append(sequence)
        for observer in self._observers:
            observer.on_arrival(record)
        if record.request.abort_after is not None:
            self.call_at(self.now + record.request.abort_after, partial(self.abort, record.id))
        if self._wake == inf and self._step is None:
            self._wake = self.now + SCHEDULING_SECONDS

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence in self._arrived:
            self._arrived.remove(sequence)
        else:
            self._scheduler.remove(sequence)
        sequence.ended = True
        del self._live[sequence.record.id]
        sequence.record.generated_tokens = sequence.generated
        self._close(sequence.record, reason)

    def _close(self, record: RequestRecord, reason: FinishReason) -> None:
        record.finished, record.finish_reason = self.now, reason
        for observer in self._observers:
            observer.on_finish(record)

    # Steps.

    def _begin_step(self) -> None:
        """Take what arrived, plan the batch, and set the moment at which it ends."""
        self._take_arrivals()
        if self._memory.full(self.now):
            self._down("dead", "out_of_memory")
            return
        batch = self._plan()
        self._wake = inf
        if not batch.decodes and not batch.prefills:
            return
        tokens = batch.prefill_tokens
        step = StepRecord(
            self.steps, self.now, self._duration(len(batch.decodes), tokens),
            len(batch.prefills), tokens, len(batch.decodes),
        )  # fmt: skip
        self._memory.hold_step(tokens + len(batch.decodes))
        self._step = step, batch
        if self.state != "hung":
            self._wake = self.now + step.seconds

    def _take_arrivals(self) -> None:
        for sequence in self._arrived:
            sequence.record.queued = max(sequence.record.arrival, self.now - SCHEDULING_SECONDS)
            self._scheduler.add(sequence)
        self._arrived.clear()

    def _plan(self) -> Batch:
        preempted = []
        if self._pool_limit is not None:
            preempted = self._scheduler.shrink(self._pool_limit)
            self._pool_limit = None
        batch = self._scheduler.plan()
        for sequence in preempted + batch.preempted:
            for observer in self._observers:
                observer.on_preempt(sequence.record)
        for sequence in batch.admitted:
            if sequence.record.scheduled is None:
                sequence.record.scheduled = self.now
                for observer in self._observers:
                    observer.on_scheduled(sequence.record)
        return batch

    def _duration(self, decodes: int, prefill_tokens: int) -> float:
        config = self.config
        seconds = (
            config.step_base_seconds
            + config.step_per_decode_seconds * decodes
            + config.step_per_prefill_token_seconds * prefill_tokens
        )
        noise = config.step_noise_ratio * (2 * self._random.random() - 1)
        return seconds * (1 + noise) * self._slowdown

    def _end_step(self, step: StepRecord, batch: Batch) -> None:
        """Every decode and every finished prefill gives a token; who has all of them leaves."""
        now, gaps = self.now, []
        speaking = []
        for sequence in batch.decodes:
            if not sequence.ended:
                gaps.append(now - sequence.last_token)
                speaking.append(sequence)
        for sequence, tokens in batch.prefills:
            sequence.pending -= tokens
            if not sequence.ended and not sequence.pending:
                if sequence.record.first_token is None:
                    self._first_token(sequence.record)
                else:
                    gaps.append(now - sequence.last_token)
                speaking.append(sequence)
        done = []
        for sequence in speaking:
            sequence.length += 1
            sequence.last_token = now
            if sequence.length == sequence.target:
                done.append(sequence)
        if speaking:
            records = [sequence.record for sequence in speaking]
            for observer in self._observers:
                observer.on_tokens(records, gaps)
        self._after_step(step, done)

    def _first_token(self, record: RequestRecord) -> None:
        record.first_token = self.now
        for observer in self._observers:
            observer.on_first_token(record)

    def _after_step(self, step: StepRecord, done: list[Sequence]) -> None:
        self._step = None
        self.steps += 1
        for sequence in done:
            hit_limit = sequence.generated >= sequence.record.max_tokens
            self._finish(sequence, "length" if hit_limit else "stop")
        self.published = self._scheduler.gauges
        for observer in self._observers:
            observer.on_step(step)
        self._wake = self.now + SCHEDULING_SECONDS if self._live else inf

    # Trouble.

    def fail(self, kind: Event) -> None:
        """Break in the given way (one of FAULTS); a server that is down stays as it is.

        hang: no step ends any more, until the executor gives up after execute_timeout_seconds (`timeout`).
        kv_small: from the next step on the KV pool just holds one request of the maximum length.
        The others kill the engine at once.  Raises ValueError for an unknown kind.
        """
        if kind not in FAULTS:
            raise ValueError(f"unknown fault {kind!r}; known are {', '.join(FAULTS)}")
        if self.state in ("dead", "stopped"):
            return
        if kind == "hang":
            self._hang()
        elif kind == "kv_small":
            self._pool_limit = ceil(self.config.max_model_len / self.config.block_size)
            self._tell(kind)
        else:
            self._down("dead", kind)

    def slow(self, factor: float) -> None:
        """Steps planned from now on take *factor* times as long as the config says."""
        if factor <= 0:
            raise ValueError("the factor must be above 0")
        self._slowdown = factor

    def leak(self, bytes_per_second: float) -> None:
        """Lose GPU memory at this rate from now on.  The step that finds none left dies of out_of_memory."""
        self._memory.leak(bytes_per_second, self.now)

    def stop(self) -> None:
        """A planned stop (SIGTERM) in vLLM's default mode: what is in flight is aborted."""
        if self.state in ("serving", "hung"):
            self._down("stopped", "stop")

    def restart(self) -> None:
        """Begin anew with empty queues and without any fault; a server that runs is stopped first."""
        self.stop()
        self._reset()
        self._tell("start")

    def _hang(self) -> None:
        if self.state == "hung":
            return
        self.state = "hung"
        self._tell("hang")
        if self._step is not None:
            self._wake = inf
        hung = self._scheduler

        def give_up() -> None:
            if self._scheduler is hung:  # else it was restarted meanwhile
                self.fail("timeout")

        self.call_at(self.now + self.config.execute_timeout_seconds, give_up)

    def _down(self, state: State, event: Event) -> None:
        self.state, self._wake, self._step = state, inf, None
        self._tell(event)
        reason: FinishReason = "abort" if state == "stopped" else "error"
        for sequence in list(self._live.values()):
            self._finish(sequence, reason)

    def _tell(self, event: Event) -> None:
        for observer in self._observers:
            observer.on_event(event)
