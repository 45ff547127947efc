"""Which requests take part in the next step, and who holds the KV cache.

As vLLM's V1 scheduler: first come, first served; a step is one token for every decoding request plus chunks
of prompts within `max_batched_tokens`; a request is admitted once there is a place among the running and
blocks for all its tokens; when a growing request finds no block, the newest running one gives up its own,
goes back to the head of the queue, and all its tokens are computed again later.
"""

from collections import deque
from dataclasses import dataclass, field

from .config import EngineConfig
from .records import Gauges, RequestRecord


class Sequence:
    """A request in the engine: its tokens, and the KV blocks it holds."""

    __slots__ = ("blocks", "capacity", "ended", "last_token", "length", "pending", "record", "target")

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.length = record.prompt_tokens  # prompt and what was generated so far
        self.target = self.length + min(record.request.output_tokens, record.max_tokens)
        self.pending = 0  # tokens still to be prefilled
        self.blocks = 0
        self.capacity = 0  # tokens these blocks hold
        self.last_token = 0.0  # when
        self.ended = False  # left the engine, perhaps with a step under way that it is part of

    @property
    def generated(self) -> int:
        return self.length - self.record.prompt_tokens


@dataclass(slots=True)
class Batch:
    """One step's work.  *prefills* come with their number of tokens."""

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def prefill_tokens(self) -> int:
        return sum(tokens for _, tokens in self.prefills)


class Scheduler:
    """The queue, the running batch and the pool of KV blocks (one of which is never usable)."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._blocks = self._free = config.kv_blocks - 1

    @property
    def gauges(self) -> Gauges:
        usage = (self._blocks - self._free) / self._blocks
        return Gauges(len(self._running), len(self._waiting), usage)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It ended, or the client left; wherever it is."""
        if sequence.blocks:
            self._running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting.remove(sequence)

    def shrink(self, blocks: int) -> list[Sequence]:
        """Cut the pool; gives the requests that lost their blocks by it.  Only between two steps."""
        self._free -= self._blocks - blocks
        self._blocks = blocks
        preempted = []
        while self._free < 0:
            preempted.append(self._preempt_newest())
        return preempted

    def plan(self) -> Batch:
        """The next step's batch; empty only if there is no work at all."""
        batch = Batch()
        budget = self._continue_running(batch, self._config.max_batched_tokens)
        self._admit_waiting(batch, budget)
        return batch

    def _continue_running(self, batch: Batch, budget: int) -> int:
        """Gives what is left of the budget of tokens."""
        running, index = self._running, 0
        while index < len(running) and budget:
            sequence = running[index]
            if sequence.pending:
                budget -= self._prefill(batch, sequence, budget)
            else:
                while sequence.length > sequence.capacity and not self._reserve(sequence):
                    batch.preempted.append(self._preempt_newest())
                    if batch.preempted[-1] is sequence:
                        return budget
                batch.decodes.append(sequence)
                budget -= 1
            index += 1
        return budget

    def _admit_waiting(self, batch: Batch, budget: int) -> None:
        waiting, running = self._waiting, self._running
        while waiting and budget and len(running) < self._config.max_running_requests:
            sequence = waiting[0]
            if not self._reserve(sequence):
                return
            running.append(waiting.popleft())
            sequence.pending = sequence.length
            batch.admitted.append(sequence)
            budget -= self._prefill(batch, sequence, budget)

    def _prefill(self, batch: Batch, sequence: Sequence, budget: int) -> int:
        tokens = min(sequence.pending, budget)
        batch.prefills.append((sequence, tokens))
        return tokens

    def _reserve(self, sequence: Sequence) -> bool:
        """Get blocks for all its tokens, or none."""
        needed = -(-sequence.length // self._config.block_size) - sequence.blocks
        if needed > self._free:
            return False
        self._free -= needed
        sequence.blocks += needed
        sequence.capacity = sequence.blocks * self._config.block_size
        return True

    def _release(self, sequence: Sequence) -> None:
        self._free += sequence.blocks
        sequence.blocks = sequence.capacity = 0

    def _preempt_newest(self) -> Sequence:
        sequence = self._running.pop()
        self._release(sequence)
        sequence.record.preemptions += 1
        self._waiting.appendleft(sequence)
        return sequence
