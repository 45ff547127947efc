"""What the engine does to requests, in virtual time."""

from statistics import mean

import pytest

from exporter.simulator import (
    FAULTS,
    ClosedLoop,
    Engine,
    EngineConfig,
    Observer,
    Poisson,
    Request,
    RequestRecord,
    Truth,
    exact_quantile,
    simulate,
)
from exporter.simulator.load import fixed, requests

SHORT = requests(fixed(40), fixed(64), ignore_eos=True)


class Diary(Observer):
    """What was told, in order."""

    def __init__(self, engine: Engine) -> None:
        self.entries: list[str] = []
        engine.attach(self)

    def on_arrival(self, record: RequestRecord) -> None:
        self.entries.append("arrival")

    def on_scheduled(self, record: RequestRecord) -> None:
        self.entries.append("scheduled")

    def on_first_token(self, record: RequestRecord) -> None:
        self.entries.append("first_token")

    def on_tokens(self, records, gaps) -> None:
        self.entries.append(f"{len(records)} tokens, {len(gaps)} gaps")

    def on_finish(self, record: RequestRecord) -> None:
        self.entries.append(f"finish: {record.finish_reason}")

    def on_step(self, step) -> None:
        self.entries.append(f"step: {step.phase}")

    def on_event(self, event) -> None:
        self.entries.append(event)


def tiny(seed: int = 0, **changes) -> Engine:
    return Engine(EngineConfig.tiny(**changes), seed)


def ask(engine: Engine, prompt: int = 40, output: int = 64, **changes) -> RequestRecord:
    return engine.submit(Request(prompt_tokens=prompt, output_tokens=output, **changes))


def test_one_request_is_told_in_order() -> None:
    engine = tiny()
    diary = Diary(engine)
    ask(engine, output=2, max_tokens=2)
    engine.advance(1)
    assert diary.entries == [
        *("arrival", "scheduled"),
        *("first_token", "1 tokens, 0 gaps", "step: prefill"),
        *("1 tokens, 1 gaps", "finish: length", "step: decode"),
    ]


def test_step_time_is_base_plus_its_batch() -> None:
    engine = tiny(step_noise_ratio=0.0)
    truth = Truth(engine)
    for _ in range(3):
        ask(engine, prompt=100, output=2)
    engine.advance(1)
    config = engine.config
    prefill, decode = truth.steps
    assert prefill.seconds == pytest.approx(config.step_base_seconds + 300 * config.step_per_prefill_token_seconds)
    assert decode.seconds == pytest.approx(config.step_base_seconds + 3 * config.step_per_decode_seconds)


def test_long_prompt_is_prefilled_in_chunks_beside_the_decodes() -> None:
    engine = tiny(max_batched_tokens=100)
    truth = Truth(engine)
    ask(engine, prompt=10, output=20)
    engine.advance(0.006)
    ask(engine, prompt=250, output=1)
    engine.advance(1)
    mixed = [step for step in truth.steps if step.phase == "mixed"]
    assert [(step.prefill_tokens, step.decode_requests) for step in mixed] == [(99, 1), (99, 1), (52, 1)]


@pytest.mark.parametrize(
    ("output", "max_tokens", "reason", "generated"),
    [(20, None, "stop", 20), (20, 30, "stop", 20), (20, 20, "length", 20), (50, 20, "length", 20)],
)
def test_finish_reason(output: int, max_tokens: int | None, reason: str, generated: int) -> None:
    engine = tiny()
    record = ask(engine, output=output, max_tokens=max_tokens)
    engine.advance(5)
    assert (record.finish_reason, record.generated_tokens) == (reason, generated)


def test_queue_wait_begins_when_the_core_takes_the_request() -> None:
    """As in vLLM: the rest of the step under way is in the time to first token only."""
    engine = tiny(step_noise_ratio=0.0, step_base_seconds=1.0, step_per_prefill_token_seconds=0.0)
    ask(engine)
    engine.advance(0.25)
    late = ask(engine, prompt=1, output=1)
    engine.advance(10)
    assert late.queue_wait == pytest.approx(30e-6)
    assert late.time_to_first_token == pytest.approx(0.75 + 1.0, abs=0.01)


def test_request_arriving_between_two_steps_is_queued_from_its_arrival() -> None:
    engine = tiny()
    ask(engine)
    engine.advance(10e-6)
    second = ask(engine)
    engine.advance(1)
    assert second.queued == second.arrival == 10e-6
    assert second.queue_wait == pytest.approx(20e-6)


def test_gauges_are_those_of_the_end_of_the_last_step() -> None:
    engine = tiny(max_running_requests=1, step_base_seconds=1.0)
    ask(engine)
    ask(engine)
    engine.advance(0.5)
    assert (engine.published.running, engine.published.waiting) == (0, 0)
    assert (engine.running, engine.waiting) == (1, 1)
    engine.advance(1.5)
    assert (engine.published.running, engine.published.waiting) == (1, 1)


def test_same_seed_same_run() -> None:
    def run(seed: int) -> list[tuple[float | None, str]]:
        truth = simulate(tiny(seed), Poisson(5.0, mix=SHORT, seed=seed), 30)
        return [(record.finished, record.id) for record in truth.requests]

    assert run(7) == run(7)
    assert run(7) != run(8)


def test_above_capacity_the_queue_grows_linearly_and_the_step_stays_flat() -> None:
    """The seeds' first case: queue wait rises with concurrency, the step does not."""
    waits, steps = {}, {}
    for concurrency in (64, 96, 128, 192, 256):
        engine = Engine(EngineConfig.hy3_h20(), seed=1)
        load = ClosedLoop(concurrency, mix=requests(fixed(500), fixed(200)), seed=1)
        truth = simulate(engine, load, 600)
        late = [record for record in truth.requests if record.arrival > 100 and record.completed]
        waits[concurrency] = mean(record.queue_wait or 0.0 for record in late)
        steps[concurrency] = exact_quantile([s.seconds for s in truth.steps if s.phase == "decode"], 0.5)
    assert waits[64] < 0.1
    slope = waits[128] / 64
    for concurrency in (96, 192, 256):
        assert waits[concurrency] == pytest.approx(slope * (concurrency - 64), rel=0.15)
    assert max(steps.values()) < 1.05 * min(steps.values())


def test_with_room_in_the_batch_the_step_grows_and_the_queue_stays_short() -> None:
    """The seeds' second case: a larger batch, and the step is the bottleneck."""
    medians = {}
    for concurrency in (1, 16, 64, 256):
        engine = Engine(EngineConfig.hy3_h20(max_running_requests=256), seed=1)
        mix = requests(fixed(100), fixed(200))
        truth = simulate(engine, ClosedLoop(concurrency, mix=mix, seed=1), 200)
        medians[concurrency] = exact_quantile([s.seconds for s in truth.steps if s.phase == "decode"], 0.5)
        assert truth.quantile("queue_wait", 0.5) < 0.05
    assert medians[1] == pytest.approx(0.025, rel=0.1)
    assert medians[64] == pytest.approx(0.060, rel=0.1)
    assert medians[256] > 2 * medians[64]


def test_small_kv_cache_preempts_and_all_still_finish() -> None:
    engine = tiny(kv_blocks=33)
    truth = Truth(engine)
    records = [ask(engine, prompt=100, output=100, max_tokens=100) for _ in range(8)]
    engine.advance(60)
    assert sum(record.preemptions for record in records) > 0
    assert {record.finish_reason for record in records} == {"length"}
    assert {record.generated_tokens for record in records} == {100}
    recomputed = sum(step.prefill_tokens for step in truth.steps) - 8 * 100
    assert recomputed >= 100
    assert engine.kv_usage == 0


def test_newest_request_is_preempted_first_and_comes_back_before_those_who_wait() -> None:
    engine = tiny(kv_blocks=33)
    records = [ask(engine, prompt=150, output=60) for _ in range(6)]
    engine.advance(60)
    assert [record.preemptions > 0 for record in records[:3]] == [False, False, True]
    finished = [record.finished or 0.0 for record in records]
    assert finished == sorted(finished)


def test_kv_small_shrinks_the_pool_to_one_longest_request() -> None:
    engine = tiny(kv_blocks=65)
    records = [ask(engine, prompt=100, output=100) for _ in range(6)]
    engine.advance(0.1)
    before = engine.kv_usage
    engine.fail("kv_small")
    usages = []
    for millisecond in range(101, 200):
        engine.advance(millisecond / 1000)
        usages.append(engine.kv_usage)
    assert before < max(usages) <= 1
    engine.advance(60)
    assert sum(record.preemptions for record in records) > 0
    assert all(record.completed for record in records)


def test_too_long_and_queue_full_are_refused_at_once() -> None:
    engine = tiny(max_queued_requests=2)
    too_long = ask(engine, prompt=500, output=1, max_tokens=100)
    assert (too_long.finish_reason, too_long.http_status, too_long.accepted) == ("too_long", 400, False)
    assert ask(engine, prompt=600).finish_reason == "too_long"
    waiting = [ask(engine) for _ in range(3)]
    assert [record.finish_reason for record in waiting] == [None, None, "queue_full"]
    assert waiting[-1].http_status == 503


@pytest.mark.parametrize("moment", [0.0, 0.00001, 0.002, 0.1])
def test_abort_frees_everything_wherever_the_request_is(moment: float) -> None:
    engine = tiny()
    gone = ask(engine, abort_after=moment)
    stays = ask(engine)
    engine.advance(10)
    assert (gone.finish_reason, gone.finished) == ("abort", moment)
    assert stays.completed
    assert (engine.in_flight, engine.kv_usage) == (0, 0)


def test_abort_of_a_waiting_request() -> None:
    engine = tiny(max_running_requests=1)
    ask(engine)
    gone = ask(engine, abort_after=0.05)
    engine.advance(10)
    assert (gone.finish_reason, gone.scheduled, gone.generated_tokens) == ("abort", None, 0)


KILLERS = [fault for fault in FAULTS if fault not in ("hang", "kv_small")]


@pytest.mark.parametrize("fault", KILLERS)
def test_fault_ends_everything_in_flight_and_refuses_what_follows(fault) -> None:
    engine = tiny()
    diary = Diary(engine)
    records = [ask(engine) for _ in range(10)]
    engine.advance(0.1)
    engine.fail(fault)
    assert engine.state == "dead"
    assert {record.finish_reason for record in records} == {"error"}
    assert diary.entries[-11:] == [fault, *["finish: error"] * 10]
    later = ask(engine)
    assert (later.finish_reason, later.http_status) == ("error", 500)
    assert engine.gpu_memory_used_bytes == 0
    engine.advance(1000)
    assert engine.steps > 0


def test_hang_ends_no_step_until_the_executor_gives_up() -> None:
    engine = tiny()
    record = ask(engine)
    engine.advance(0.1)
    engine.fail("hang")
    steps = engine.steps
    engine.advance(300)
    assert (engine.state, engine.steps, record.finished) == ("hung", steps, None)
    engine.advance(301)
    assert (engine.state, record.finish_reason) == ("dead", "error")


def test_hang_of_an_idle_engine_shows_at_the_next_request() -> None:
    engine = tiny()
    engine.fail("hang")
    record = ask(engine)
    engine.advance(100)
    assert (engine.running, record.first_token) == (1, None)


def test_restart_after_a_hang_is_not_killed_by_the_old_timeout() -> None:
    engine = tiny()
    engine.fail("hang")
    engine.restart()
    engine.advance(400)
    assert engine.state == "serving"


def test_slow_multiplies_the_step() -> None:
    engine = tiny(step_noise_ratio=0.0)
    truth = Truth(engine)
    ask(engine, output=10)
    engine.advance(1)
    engine.slow(3.0)
    ask(engine, output=10)
    engine.advance(2)
    first, second = truth.steps[5].seconds, truth.steps[15].seconds
    assert second == pytest.approx(3 * first)
    with pytest.raises(ValueError, match="above 0"):
        engine.slow(0)


def test_stop_aborts_what_is_in_flight() -> None:
    engine = tiny()
    record = ask(engine)
    engine.advance(0.1)
    engine.stop()
    assert (engine.state, record.finish_reason) == ("stopped", "abort")
    engine.fail("cuda")
    assert engine.state == "stopped"


def test_restart_begins_anew() -> None:
    engine = tiny()
    diary = Diary(engine)
    ask(engine)
    engine.advance(0.1)
    engine.fail("cuda")
    engine.restart()
    record = ask(engine)
    engine.advance(5)
    assert record.completed
    assert diary.entries.count("start") == 1


def test_gpu_memory_is_flat_but_for_the_first_large_steps() -> None:
    engine = Engine(EngineConfig.hy3_h20())
    assert engine.gpu_memory_used_bytes == engine.config.idle_memory_bytes
    simulate(engine, ClosedLoop(64, seed=1), 60)
    plateau = engine.gpu_memory_used_bytes
    assert plateau == engine.config.idle_memory_bytes + engine.config.activation_bytes
    assert 0.9 < plateau / engine.config.gpu_memory_bytes < 0.93
    engine.advance(600)
    assert engine.gpu_memory_used_bytes == plateau


def test_leak_grows_until_a_step_dies_of_it() -> None:
    engine = tiny()
    diary = Diary(engine)
    free = engine.config.gpu_memory_bytes - engine.gpu_memory_used_bytes
    engine.leak(free / 100)
    engine.advance(50)
    half = engine.gpu_memory_used_bytes - engine.config.idle_memory_bytes
    assert half == pytest.approx(free / 2, rel=1e-6)
    engine.leak(0)
    engine.advance(80)
    assert engine.gpu_memory_used_bytes - engine.config.idle_memory_bytes == half
    engine.leak(free / 100)
    engine.advance(200)
    assert engine.gpu_memory_used_bytes == engine.config.gpu_memory_bytes
    record = ask(engine)
    engine.advance(201)
    assert record.finish_reason == "error"
    assert "out_of_memory" in diary.entries


def test_wrong_use_is_refused() -> None:
    engine = tiny()
    engine.advance(1)
    with pytest.raises(ValueError, match="backwards"):
        engine.advance(0)
    with pytest.raises(ValueError, match="unknown fault 'stop'"):
        engine.fail("stop")
    with pytest.raises(ValueError, match="at least one"):
        Request(prompt_tokens=0, output_tokens=1)
    with pytest.raises(ValueError, match="do not hold one request"):
        EngineConfig.tiny(kv_blocks=32)
    with pytest.raises(ValueError, match="do not fit the GPU"):
        EngineConfig.tiny(kv_blocks=200)
