"""Failed requests of which no error tells, in the store of a sidecar."""

from collections.abc import Callable

import pytest
from harness import Clock

from exporter import catalog
from exporter.lifecycle import Lifecycle
from exporter.signals import Origin, Reading
from exporter.store import Store
from exporter.untold import Untold


class Server:
    """What page and log of an engine tell, by hand. Its errors may be told 11 s before."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.lifecycle = Lifecycle(has_page=True)
        untold = Untold(self.lifecycle, self.clock, before=lambda: 11.0)
        self.store = Store(clock=self.clock, wall=self.clock, untold=untold)
        self.lifecycle.answered(healthy=True, moved=False, started_at=None)

    def ends(self, outcome: str, times: int = 1) -> "Server":
        self.store.count(catalog.REQUESTS, ("m", outcome), times, origin="metrics")
        return self

    def tells(self, kind: str, origin: Origin = "log") -> "Server":
        self.store.count(catalog.ERRORS, (kind,), origin=origin)
        return self

    def enters(self, phase: str) -> "Server":
        self.lifecycle.enter(phase)
        return self

    def pass_(self, seconds: float) -> "Server":
        """A page a second."""
        for _ in range(round(seconds)):
            self.clock.pass_(1.0)
            self.store.publish(Reading("metrics", "metrics", ok=True, at=self.clock.now))
        return self

    @property
    def errors(self) -> dict[tuple[str, ...], float]:
        return {labels: n for labels, n in self.store.counters[catalog.ERRORS].items() if n}


def test_a_request_that_failed_and_of_which_nothing_tells_is_an_error_of_the_kind_other() -> None:
    server = Server().ends("ok", 50).ends("error", 3).pass_(9)
    assert (server.errors, server.store.last_error) == ({}, {})
    server.pass_(1)
    assert (server.errors, server.store.last_error) == ({("other", "metrics"): 3.0}, {"other": 1010.0})
    server.pass_(60)
    assert server.errors == {("other", "metrics"): 3.0}


TOLD: dict[str, tuple[Callable[[Server], object], dict[tuple[str, ...], float]]] = {
    "before": (lambda s: s.tells("timeout").pass_(11).ends("error"), {("timeout", "log"): 1.0}),
    "long before": (
        lambda s: s.tells("timeout").pass_(12).ends("error"),
        {("timeout", "log"): 1.0, ("other", "metrics"): 1.0},
    ),
    "a little later": (lambda s: s.ends("error", 4).pass_(9).tells("cuda"), {("cuda", "log"): 1.0}),
    "too late": (
        lambda s: s.ends("error", 4).pass_(10).tells("cuda"),
        {("other", "metrics"): 4.0, ("cuda", "log"): 1.0},
    ),
    "by the page, of which the log has the word": (
        lambda s: s.tells("server_error", "metrics").pass_(60).ends("error").tells("server_error", "log"),
        {("server_error", "metrics"): 1.0},
    ),
    "a refusal tells only what was refused": (
        lambda s: s.ends("error").tells("rejected"),
        {("rejected", "log"): 1.0, ("other", "metrics"): 1.0},
    ),
    "who went away": (lambda s: s.ends("aborted", 9).ends("rejected", 9), {}),
    "as the engine stops": (lambda s: s.ends("error", 3).pass_(2).enters("stopping"), {}),
    "while it stops": (lambda s: s.enters("stopping").ends("error", 16).pass_(3).enters("starting"), {}),
    "as it dies": (lambda s: s.ends("error", 3).pass_(2).enters("dead"), {}),
}


@pytest.mark.parametrize("case", TOLD)
def test_what_something_else_tells_is_no_further_error(case: str) -> None:
    server, (happens, errors) = Server(), TOLD[case]
    happens(server)
    assert server.pass_(60).errors == errors


def test_what_ends_in_a_planned_stop_is_no_failed_request() -> None:
    server = Server().ends("error", 2).enters("stopping").ends("error", 16).ends("aborted", 3)
    assert server.store.counters[catalog.REQUESTS] == {("m", "error"): 2.0, ("m", "aborted"): 3.0}


def test_failures_that_a_log_tells_one_by_one_are_the_same() -> None:
    server = Server()
    server.store.count_all(catalog.REQUESTS, ("m", "error"), [1.0, 1.0], origin="log")
    assert server.pass_(10).errors == {("other", "log"): 2.0}
