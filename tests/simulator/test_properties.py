"""Whatever is asked of the engine and whatever happens to it, nothing is lost and nothing is impossible."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.simulator import FAULTS, Engine, EngineConfig, Observer, Request, RequestRecord, Truth

REQUEST = st.builds(
    Request,
    prompt_tokens=st.integers(1, 140),
    output_tokens=st.integers(1, 140),
    max_tokens=st.none() | st.integers(1, 80),
    abort_after=st.none() | st.floats(0, 3),
)
SUBMIT = st.tuples(st.just("submit"), st.lists(REQUEST, min_size=1, max_size=12))
WAIT = st.tuples(st.just("wait"), st.floats(0, 1))
TROUBLE = st.one_of(
    st.tuples(st.just("slow"), st.floats(0.1, 10)),
    st.tuples(st.just("fail"), st.sampled_from(FAULTS)),
    st.tuples(st.just("leak"), st.floats(0, 2**30)),
    st.tuples(st.just("stop"), st.none()),
    st.tuples(st.just("restart"), st.none()),
)
ACTION = st.integers(0, 9).flatmap(lambda n: TROUBLE if n == 9 else WAIT if n % 2 else SUBMIT)


def tiny(block_size: int, spare_blocks: int, **changes) -> EngineConfig:
    """Room for one longest request and a little more, so that preemption is common."""
    return EngineConfig.tiny(
        max_model_len=160,
        block_size=block_size,
        kv_blocks=160 // block_size + 1 + spare_blocks,
        kv_bytes_per_token=2**18,
        execute_timeout_seconds=2.0,
        **changes,
    )


CONFIG = st.builds(
    tiny,
    block_size=st.sampled_from([1, 8, 16]),
    spare_blocks=st.integers(0, 30),
    max_running_requests=st.integers(1, 8),
    max_batched_tokens=st.integers(8, 300),
    max_queued_requests=st.none() | st.integers(0, 10),
)


class Watch(Observer):
    """Looks at the engine whenever it says something."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.arrived: list[RequestRecord] = []
        self.tokens: Counter[str] = Counter()
        engine.attach(self)

    def on_arrival(self, record: RequestRecord) -> None:
        self.arrived.append(record)

    def on_tokens(self, records, gaps) -> None:
        assert all(gap > 0 for gap in gaps)
        assert len({record.id for record in records}) == len(records)
        self.tokens.update(record.id for record in records)

    def on_step(self, step) -> None:
        config = self._engine.config
        assert step.seconds > 0
        assert step.start + step.seconds == self._engine.now
        assert 0 < step.prefill_tokens + step.decode_requests <= config.max_batched_tokens
        assert step.prefill_requests + step.decode_requests <= config.max_running_requests
        self.look()

    def look(self) -> None:
        engine = self._engine
        assert 0 <= engine.kv_usage <= 1
        assert 0 <= engine.running <= engine.config.max_running_requests
        assert engine.running + engine.waiting == engine.in_flight
        assert 0 <= engine.gpu_memory_used_bytes <= engine.config.gpu_memory_bytes


def play(engine: Engine, actions) -> list[RequestRecord]:
    submitted = []
    for name, argument in actions:
        if name == "submit":
            submitted += [engine.submit(request) for request in argument]
        elif name == "wait":
            engine.advance(engine.now + argument)
        elif argument is None:
            getattr(engine, name)()
        else:
            getattr(engine, name)(argument)
    engine.slow(1.0)
    engine.advance(engine.now + 300)
    return submitted


@settings(max_examples=150, deadline=None)
@given(config=CONFIG, seed=st.integers(0, 5), actions=st.lists(ACTION, max_size=25))
def test_every_request_ends_once_and_in_order(config, seed, actions) -> None:
    engine = Engine(config, seed)
    truth, watch = Truth(engine), Watch(engine)
    submitted = play(engine, actions)
    watch.look()

    assert Counter(id(record) for record in truth.requests) == Counter(id(record) for record in submitted)
    assert {id(r) for r in watch.arrived} == {id(r) for r in submitted if r.accepted}
    assert (engine.in_flight, engine.running, engine.waiting, engine.kv_usage) == (0, 0, 0, 0)
    for record in submitted:
        stamps = [record.arrival, record.queued, record.scheduled, record.first_token, record.finished]
        known = [stamp for stamp in stamps if stamp is not None]
        assert known == sorted(known)
        assert record.generated_tokens == watch.tokens[record.id]
        assert record.generated_tokens <= min(record.request.output_tokens, record.max_tokens)
        if record.completed:
            assert None not in stamps
            assert record.generated_tokens == min(record.request.output_tokens, record.max_tokens)
            assert (record.finish_reason == "length") == (record.generated_tokens == record.max_tokens)
        if record.accepted and record.latency:
            assert truth.concurrency(record) >= 1 - 1e-9


@settings(max_examples=30, deadline=None)
@given(config=CONFIG, seed=st.integers(0, 5), actions=st.lists(ACTION, max_size=15))
def test_the_same_again_is_the_same(config, seed, actions) -> None:
    def run():
        engine = Engine(config, seed)
        return [(r.id, r.finished, r.finish_reason, r.preemptions) for r in play(engine, actions)], engine.steps

    assert run() == run()
