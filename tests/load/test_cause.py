"""Queue or step: what grew."""

import msgspec
import pytest
from measured import engine, level

from exporter.load.cause import cause
from exporter.load.result import Engine, Quantiles, Step

CALM = level(1, [1.0] * 60, engine=engine())


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (engine(), "queue flat, step flat"),
        (engine(queue=0.5), "queue grows, step flat"),
        (engine(step=0.03), "queue flat, step grows"),
        (engine(queue=0.5, step=0.03), "queue grows, step grows"),
    ],
)
def test_the_sidecar_tells(now: Engine, expected: str) -> None:
    assert cause(level(8, [2.0] * 60, engine=now), CALM) == expected


def test_the_client_tells_where_there_is_no_sidecar() -> None:
    """Its first token comes after a quarter of the time, its tokens a fortieth apart."""
    calm = level(1, [1.0] * 60)
    assert cause(level(2, [1.1] * 60), calm) == "queue flat, step flat (seen by the client)"
    assert cause(level(8, [3.0] * 60), calm) == "queue grows, step grows (seen by the client)"


def test_one_stall_at_the_baseline_hides_no_queue() -> None:
    """The wait of the slowest did not grow, that of everybody did."""
    stalled = engine(queue=2.0)
    calm = level(
        1, [1.0] * 58 + [3.0] * 2, engine=msgspec.structs.replace(stalled, queue_wait=Quantiles(0.0, 0.1, 2.0))
    )
    waiting = msgspec.structs.replace(stalled, queue_wait=Quantiles(1.0, 1.5, 2.0))
    assert cause(level(8, [2.0] * 60, engine=waiting), calm) == "queue grows, step flat"


def test_an_engine_that_mixes_its_phases() -> None:
    mixed = [
        level(n, [1.0] * 60, engine=Engine(Quantiles(p99=0.1), {"mixed": Step(9.0, s, s, s)}))
        for n, s in ((1, 0.01), (2, 0.02))
    ]
    assert cause(mixed[1], mixed[0]) == "queue flat, step grows"
