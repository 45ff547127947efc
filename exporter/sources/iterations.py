"""What an engine tells of each of its iterations as JSON, read as if each were a line of its log.

TensorRT-LLM does so. Its records are gone once they are read, so this is off unless asked for.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from exporter.engines.profile import Profile
from exporter.signals import Reading
from exporter.sources.fetch import Server, Unreadable
from exporter.sources.lines import Lines
from exporter.store import Store

SOURCE = "iterations"
_MARK = b"iteration "  # so that a record is a message of its own shape and not a JSON log line


class IterationSource:
    """Fetches the records at the profile's path every *tick* and gives them to *lines*.

    *profile* is asked each time: until the engine is recognised, and for one that tells no iterations, nothing is
    fetched.
    """

    def __init__(
        self,
        server: Server,
        profile: Callable[[], Profile | None],
        lines: Lines,
        store: Store,
        *,
        tick: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self._server = server
        self._profile = profile
        self._lines = lines
        self._store = store
        self._tick = tick
        self._clock = clock

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.once()
            await self._tick()

    async def once(self) -> None:
        """One attempt; what goes wrong becomes a failed reading."""
        began, reason = self._clock(), ""
        try:
            records = await self._records()
        except Unreadable as error:
            reason = error.reason
        else:
            self._lines.feed(b"".join(_MARK + msgspec.json.encode(r) + b"\n" for r in records), history=False)
        self._lines.flush()
        self._store.publish(
            Reading(
                SOURCE,
                "log",
                ok=not reason,
                at=self._store.wall(),
                samples=() if reason else self._lines.samples(),
                reason=reason,
                seconds=self._clock() - began,
            )
        )

    async def _records(self) -> list[dict[str, Any]]:
        profile = self._profile()
        if profile is None or not profile.iterations_path:
            raise Unreadable("no_iterations", "this engine tells none" if profile else "no engine recognised yet")
        text, _ = await self._server.get(profile.iterations_path)
        try:
            return msgspec.json.decode(text, type=list[dict[str, Any]])
        except (msgspec.DecodeError, RecursionError) as error:
            raise Unreadable("not_iterations", str(error)) from None
