"""The catalogue of incidents and of quiet days: who must be paged, and for what cause.

Each is played by `incidents.Scenario`; times are a tenth of those in production, unless stretched. Where a scenario names
no page, it needs none, whatever else it does.
"""

import math
from collections.abc import Callable

from incidents import SHORT, Scenario, poisson
from replay import Replica

from exporter import catalog
from exporter.signals import Reading
from exporter.simulator import ClosedLoop, OpenLoop, Segment
from exporter.simulator.load import Bursts, Load, Mix, fixed, lognormal, mixture, requests, uniform
from exporter.store import gauge

DOUBLED, FAILED, STALLED = "StoplineLatencyDoubled", "StoplineEngineFailed", "StoplineEngineStalled"
MEMORY, RATE = "StoplineMemoryNearLimit", "StoplineErrorRateHigh"
Happens = Callable[[Replica], None]

PROMPT = lognormal(200, 0.4, most=800)
ANSWER = uniform(8, 32)
LONG_ANSWERS = requests(PROMPT, uniform(60, 160))
LONGER_ANSWERS = requests(PROMPT, uniform(10, 42))
LONG_PROMPTS = requests(lognormal(18_000, 0.2, most=28_000), ANSWER)
SHORT_CHAT = requests(lognormal(300, 0.6, most=2000), lognormal(40, 0.6, most=300))
TOO_LONG = requests(fixed(40_000), fixed(8))
SMALL_CACHE = {"kv_blocks": 200, "max_model_len": 2048}
BIG_BATCHES = {"max_running_requests": 128}
LEAST_FREE = {"kv_blocks": 39_000, "activation_bytes": 2**28}
"""A KV cache so large that under 1 GiB of each card is left."""
MUCH_USED = {"kv_blocks": 33_000}
"""98 % of each card is used, as it was meant."""
RESTED = 450.0
"""Seconds of calm after which the sidecar knows what memory the server uses at rest; its clock is not shortened."""
PATIENT = {"execute_timeout_seconds": 3600.0}
"""An executor that does not end what hangs."""
UNLOGGED: dict[str, object] = {"log": False}
UNSEEN_GPUS: dict[str, object] = {"gpus": False}


# what happens


def load(make: Callable[[], Load | None]) -> Happens:
    return lambda replica: replica.set_load(make())


def traffic(rate: float, mix: Mix = SHORT) -> Happens:
    return load(lambda: poisson(rate, mix))


def clients(number: int, mix: Mix = SHORT) -> Happens:
    return load(lambda: ClosedLoop(number, mix=mix, seed=2))


def bursts(size: int, every: float, mix: Mix = SHORT) -> Happens:
    return load(lambda: Bursts(size, every, mix=mix, seed=2))


def ramp(seconds: float, rate: float) -> Happens:
    def happens(replica: Replica) -> None:
        rising = Segment(seconds * replica.stretch, 1.0, rate)
        replica.set_load(OpenLoop(rising, Segment(math.inf, rate), mix=SHORT, seed=2))

    return happens


def slower(factor: float) -> Happens:
    return lambda replica: replica.engine.slow(factor)


def fails(kind: str) -> Happens:
    return lambda replica: replica.engine.fail(kind)  # type: ignore[arg-type]


def hangs_idle(replica: Replica) -> None:
    then(load(lambda: None), 3.0, fails("hang"), traffic(1.0))(replica)


def hangs_idle_and_clients_give_up(replica: Replica) -> None:
    then(load(lambda: None), 3.0, fails("hang"), hangs_up(1.0))(replica)


def leaks(bytes_per_second: float) -> Happens:
    return lambda replica: replica.engine.leak(bytes_per_second / replica.stretch)


def then(*steps: Happens | float) -> Happens:
    """One after the other; a number lets so many seconds pass."""

    def happens(replica: Replica) -> None:
        for step in steps:
            if isinstance(step, float):
                replica.run(step)
            else:
                step(replica)

    return happens


def evenly(each: Happens, per_second: float, seconds: float) -> Happens:
    """Beside the server's work so many times a second, for so long."""

    def happens(replica: Replica) -> None:
        began, told = replica.now, [0]

        def since() -> None:
            due = int(min(replica.now - began, seconds * replica.stretch) * per_second)
            for _ in range(due - told[0]):
                each(replica)
            told[0] = due

        replica.meanwhile.append(since)

    return happens


def answers(status: int, per_second: float, seconds: float = math.inf) -> Happens:
    """Requests that are answered like this."""
    return evenly(lambda replica: replica.answer_with(status), per_second, seconds)


def streams_break(per_second: float, seconds: float = math.inf) -> Happens:
    """Streams that end early after their 200, and of which no log tells."""
    return evenly(lambda replica: replica.break_stream(), per_second, seconds)


def toggles(factor: float, on: float, off: float) -> Happens:
    """A neighbour on the same machine that comes and goes."""

    def happens(replica: Replica) -> None:
        began, period = replica.now, (on + off) * replica.stretch
        replica.meanwhile.append(
            lambda: replica.engine.slow(factor if (replica.now - began) % period < on * replica.stretch else 1.0)
        )

    return happens


def worsens(factor: float, seconds: float) -> Happens:
    """Steps grow slower evenly, as of a card that grows hot."""

    def happens(replica: Replica) -> None:
        began, whole = replica.now, seconds * replica.stretch
        replica.meanwhile.append(
            lambda: replica.engine.slow(1 + (factor - 1) * min(1.0, (replica.now - began) / whole))
        )

    return happens


def vanishes(replica: Replica) -> None:
    replica.server.broken = "refused"
    replica.set_load(None)


def falls_silent(replica: Replica) -> None:
    replica.server.broken = "timeout"
    replica.set_load(None)


def comes_back(replica: Replica) -> None:
    replica.engine.restart()
    replica.set_load(poisson(1.0))


def planned(seconds: float = 30.0) -> Happens:
    return then(load(lambda: None), lambda replica: replica.engine.stop(), seconds, comes_back)


def shuts_down(replica: Replica) -> None:
    """It says that it will stop; until it does, its page still answers."""
    replica.log("(APIServer pid=914) INFO 11-30 07:26:26 [launcher.py:254] [shutdown] API server: shutdown triggered")


def restarts_sidecar(replica: Replica) -> None:
    replica.restart_sidecar()


def unscraped(replica: Replica) -> None:
    replica.scraped = False


def scraped(replica: Replica) -> None:
    replica.scraped = True


def gaps(times: int = 6) -> Happens:
    return then(*(step for _ in range(times) for step in (unscraped, 3.0, scraped, 9.0)))


def other_setup(**changes: object) -> Happens:
    def happens(replica: Replica) -> None:
        config = replica.engine.config
        replica.replace_engine(type(config).hy3_h20(model=config.model, **changes), poisson(1.0))

    return happens


def loses_log(replica: Replica) -> None:
    replica.unreadable_log()


def loses_gpus(replica: Replica) -> None:
    replica.gpus_readable = False


def renames(old: str, new: str) -> Happens:
    def happens(replica: Replica) -> None:
        replica.server.renamed = lambda page: page.replace(old, new)

    return happens


def hot_spot(ratio: float) -> Happens:
    """One rank has more of the experts' work, and its engine says so."""

    def happens(replica: Replica) -> None:
        model = replica.engine.config.model
        sample = gauge(catalog.EXPERT_BALANCE, ratio, model)
        replica.meanwhile.append(
            lambda: replica.sidecar.store.publish(
                Reading("experts", "metrics", ok=True, at=replica.now, samples=(sample,))
            )
        )

    return happens


def communicates(ratio: float) -> Happens:
    """Of the time of its steps the engine tells this share to be communication, as one does that measures it."""

    def happens(replica: Replica) -> None:
        model, store = replica.engine.config.model, replica.sidecar.store

        def each() -> None:
            store.count(catalog.STEP_SECONDS, (model, "decode"), replica.poll, origin="log")
            store.count(catalog.COMMUNICATION, (model, "all"), ratio * replica.poll, origin="log")

        replica.meanwhile.append(each)

    return happens


def one_at_a_time() -> Load:
    return ClosedLoop(1, mix=SHORT, seed=2)


def asks(text: str) -> Callable[[], Load]:
    """Prompts with a text that the log shows."""
    return lambda: poisson(1.0, requests(PROMPT, ANSWER, text=text))


def hangs_up(ratio: float, rate: float = 1.0) -> Happens:
    return traffic(rate, requests(PROMPT, ANSWER, aborted=ratio))


INJECTED = (
    "(EngineCore pid=1) ERROR 11-30 07:26:24 [core.py:936] EngineDeadError: EngineCore encountered an issue\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 95.00 GiB\n"
    "[rank0]:[E1130 07:26:24 ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught collective operation timeout\n"
    'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n'
)

QUIET = (
    Scenario("healthy"),
    Scenario("healthy-learned", learns=True),
    Scenario("healthy-unlogged", replica=UNLOGGED),
    Scenario("healthy-gpus-unseen", replica=UNSEEN_GPUS),
    Scenario("busy", traffic(6.0)),
    Scenario("busier", traffic(10.0)),
    Scenario("busy-learned", traffic(6.0), learns=True),
    Scenario("busy-day", ramp(120, 8.0), after=180),
    Scenario("idle", load(lambda: None)),
    Scenario("idle-from-the-start", calm=lambda: None),
    Scenario("idle-and-back", then(load(lambda: None), 60.0, traffic(1.0))),
    Scenario("night", traffic(0.08), after=300),
    Scenario("monday", traffic(5.0), calm=lambda: poisson(0.2)),
    Scenario("blip-of-half-a-minute", then(traffic(30.0), 3.0, traffic(1.0))),
    Scenario("blip-of-a-minute", then(traffic(30.0), 6.0, traffic(1.0))),
    Scenario("blip-and-quiet", then(traffic(30.0), 6.0, load(lambda: None))),
    Scenario("two-blips", then(traffic(30.0), 3.0, traffic(1.0), 45.0, traffic(30.0), 3.0, traffic(1.0))),
    Scenario("blip-slow", then(slower(4), 5.0, slower(1))),
    Scenario("blip-learned", then(traffic(30.0), 4.0, traffic(1.0)), learns=True),
    Scenario("bursts", bursts(8, 10.0)),
    Scenario("small-bursts", bursts(4, 5.0)),
    Scenario("a-little-slower", slower(1.25)),
    Scenario("a-half-slower", slower(1.8), warns=("StoplineLatencyRising",), after=240),
    Scenario("a-little-slower-learned", slower(1.25), learns=True),
    Scenario("faster", slower(0.7)),
    Scenario("longer-answers", traffic(1.0, LONGER_ANSWERS)),
    Scenario("long-tails", calm=lambda: poisson(0.4, SHORT_CHAT), learns=True, after=200),
    Scenario("long-tails-busier", traffic(1.5, SHORT_CHAT), calm=lambda: poisson(0.4, SHORT_CHAT), learns=True),
    Scenario("doubling-of-nothing", slower(2), calm=lambda: poisson(1.0, requests(fixed(20), fixed(1))), learns=True),
    Scenario("clients-hang-up", hangs_up(0.5)),
    Scenario("most-clients-hang-up", hangs_up(0.9)),
    Scenario("all-clients-hang-up-at-night", hangs_up(1.0, 0.08), after=300),
    Scenario("clients-hang-up-busy", hangs_up(0.3, 6.0)),
    Scenario("too-long", traffic(1.0, TOO_LONG)),
    Scenario("some-too-long", traffic(3.0, mixture((0.7, SHORT), (0.3, TOO_LONG)))),
    Scenario("not-found", answers(404, 3.0)),
    Scenario("unauthorized", answers(401, 5.0)),
    Scenario("unprocessable", answers(422, 2.0)),
    Scenario("one-error", answers(500, 1.0, 1.0), warns=("StoplineErrorsAppeared",)),
    Scenario("two-errors", answers(500, 0.05, 40.0), warns=("StoplineErrorsAppeared",)),
    Scenario("one-in-a-hundred-fails", then(traffic(6.0), answers(500, 0.06)), warns=("StoplineErrorsAppeared",)),
    Scenario("one-error-at-night", then(traffic(0.08), answers(500, 1.0, 1.0)), warns=("StoplineErrorsAppeared",)),
    Scenario("streams-break-now-and-then", then(traffic(6.0), streams_break(0.06)), warns=("StoplineErrorsAppeared",)),
    Scenario("injected-prompts", load(asks(INJECTED)), replica={"prompts": True}),
    Scenario("injected-prompts-cr", load(asks(INJECTED.replace("\n", "\r"))), replica={"prompts": True}),
    Scenario("injected-prompts-ansi", load(asks("\x1b[2K\x1b[1A" + INJECTED)), replica={"prompts": True}),
    Scenario("planned-restart", planned()),
    Scenario("planned-restart-unlogged", planned(5.0), replica=UNLOGGED),
    Scenario(
        "planned-restart-under-load", then(traffic(2.0), 30.0, shuts_down, streams_break(16.0, 1.0), 2.0, planned())
    ),
    Scenario("rolling-deploy", then(planned(10.0), 20.0, planned(10.0), traffic(3.0))),
    Scenario("cold-start", then(planned(20.0), slower(6), 4.0, slower(1))),
    Scenario("cold-start-learned", then(planned(20.0), slower(6), 4.0, slower(1)), learns=True),
    Scenario("other-batch-limit", other_setup(max_running_requests=32)),
    Scenario("other-tensor-parallel", other_setup(tensor_parallel=4, kv_blocks=2100, weights_bytes=75_000_000_000)),
    Scenario("sidecar-restart", restarts_sidecar),
    Scenario("sidecar-restarts", then(restarts_sidecar, 20.0, restarts_sidecar, 20.0, restarts_sidecar)),
    Scenario("sidecar-restart-after-an-error", then(answers(500, 1.0, 1.0), 40.0, restarts_sidecar)),
    Scenario("scrape-gaps", gaps()),
    Scenario("scrape-gaps-busy", then(traffic(6.0), gaps())),
    Scenario("not-scraped", unscraped, warns=("StoplineSidecarDown",)),
    Scenario("not-scraped-briefly", then(unscraped, 9.0, scraped)),
    Scenario("log-unreadable", loses_log, warns=("StoplineLogSilent",)),
    Scenario("gpus-unreadable", loses_gpus, warns=("StoplineGpuUnreadable",)),
    Scenario(
        "metric-renamed",
        renames("vllm:e2e_request_latency_seconds", "vllm:request_latency_seconds"),
        warns=("StoplineInputMissing",),
        after=300,
    ),
    Scenario("much-memory-by-intent", engine=MUCH_USED),
    Scenario("much-memory-by-intent-learned", traffic(6.0), engine=MUCH_USED, learns=True),
    Scenario("first-big-batch", traffic(8.0), calm=lambda: poisson(0.1, requests(fixed(20), fixed(20)))),
    Scenario("cache-well-used", clients(3, requests(fixed(400), uniform(8, 32))), engine=SMALL_CACHE),
    Scenario("experts-uneven-a-little", hot_spot(0.85), after=200),
)

LATENCY = (
    Scenario("overload", traffic(30.0), (DOUBLED,), "queue"),
    Scenario("overload-just", traffic(27.0), (DOUBLED,), "queue"),
    Scenario("overload-twice", traffic(50.0), (DOUBLED,), "queue"),
    Scenario("overload-learned", traffic(30.0), (DOUBLED,), "queue", learns=True),
    Scenario("overload-unlogged", traffic(30.0), (DOUBLED,), "queue", replica=UNLOGGED),
    Scenario("overload-gpus-unseen", traffic(30.0), (DOUBLED,), "queue", replica=UNSEEN_GPUS),
    Scenario("overload-rising", ramp(60, 40.0), (DOUBLED,), "queue", due=40.0, after=150),
    Scenario("overload-by-clients", clients(64), (DOUBLED,), "queue"),
    Scenario("overload-by-clients-learned", clients(64), (DOUBLED,), "queue", learns=True),
    Scenario("overload-few-slots", traffic(14.0), (DOUBLED,), "queue", engine={"max_running_requests": 8}),
    Scenario("overload-many-slots", clients(200), (DOUBLED,), "queue", engine={"max_running_requests": 32}),
    Scenario("overload-from-idle", traffic(30.0), (DOUBLED,), "queue", calm=lambda: None),
    Scenario("overload-with-hang-ups", hangs_up(0.2, 34.0), (DOUBLED,), "queue"),
    Scenario("overload-by-bursts", bursts(90, 5.0), (DOUBLED,), "queue"),
    Scenario("overload-scrape-gaps", then(traffic(30.0), gaps()), (DOUBLED,), "queue"),
    Scenario("overload-sidecar-restart", then(traffic(30.0), 20.0, restarts_sidecar), (DOUBLED,), "queue"),
    Scenario("overload-log-lost", then(traffic(30.0), 10.0, loses_log), (DOUBLED,), "queue"),
    Scenario("overload-after-restart", then(planned(10.0), 10.0, traffic(30.0)), (DOUBLED,), "queue", due=20.0),
    Scenario("batches", clients(48, requests(fixed(200), fixed(300))), (DOUBLED,)),
    Scenario("batches-of-many", clients(40, requests(fixed(200), fixed(450))), (DOUBLED,), after=180, due=30.0),
    Scenario("slow-step", slower(3), (DOUBLED,), "step"),
    Scenario("slow-step-just", slower(2.6), (DOUBLED,), "step"),
    Scenario("slow-step-much", slower(8), (DOUBLED,), "step"),
    Scenario("slow-step-learned", slower(3), (DOUBLED,), "step", learns=True),
    Scenario("slow-step-unlogged", slower(3), (DOUBLED,), "step", replica=UNLOGGED),
    Scenario("slow-step-busy", then(traffic(4.0), slower(3)), (DOUBLED,), "step"),
    Scenario("slow-step-at-night", slower(3), (DOUBLED,), "step", calm=lambda: poisson(0.25), after=300, due=120.0),
    Scenario("slow-step-sidecar-restart", then(slower(3), 20.0, restarts_sidecar), (DOUBLED,), "step"),
    Scenario("slow-step-scrape-gaps", then(slower(3), gaps()), (DOUBLED,), "step"),
    Scenario("growing-hot", worsens(3.5, 60.0), (DOUBLED,), "step", due=30.0, after=150),
    Scenario("growing-hot-learned", worsens(3.5, 60.0), (DOUBLED,), "step", due=30.0, after=150, learns=True),
    Scenario("noisy-neighbour", toggles(4, 6.0, 3.0), (DOUBLED,), "step"),
    Scenario("noisy-neighbour-learned", toggles(4, 6.0, 3.0), (DOUBLED,), "step", learns=True),
    Scenario(
        "hot-experts",
        then(hot_spot(0.4), slower(3)),
        (DOUBLED,),
        "step",
        warns=("StoplineExpertImbalance",),
        after=300,
    ),
    Scenario(
        "cards-wait-for-each-other",
        then(communicates(0.7), slower(3)),
        (DOUBLED,),
        "communication",
        warns=("StoplineCommunicationBound",),
        after=200,
    ),
    Scenario(
        "bigger-batch",
        clients(96, requests(fixed(16), uniform(16, 32))),
        (DOUBLED,),
        "step",
        engine=BIG_BATCHES,
        learns=True,
    ),
    Scenario(
        "bigger-batch-unlogged",
        clients(96, requests(fixed(16), uniform(16, 32))),
        (DOUBLED,),
        "step",
        engine=BIG_BATCHES,
        learns=True,
        replica=UNLOGGED,
    ),
    Scenario("long-answers", traffic(1.0, LONG_ANSWERS), (DOUBLED,), "request_mix", learns=True),
    Scenario("long-answers-busier", traffic(2.0, LONG_ANSWERS), (DOUBLED,), "request_mix", learns=True),
    Scenario("long-prompts", traffic(0.4, LONG_PROMPTS), (DOUBLED,), "request_mix", learns=True),
    Scenario("some-long-answers", traffic(1.0, mixture((0.8, SHORT), (0.2, LONG_ANSWERS))), (DOUBLED,)),
    Scenario(
        "cache-full",
        clients(14, requests(fixed(400), uniform(100, 200))),
        (DOUBLED, MEMORY),
        "kv_cache",
        engine=SMALL_CACHE,
    ),
    Scenario(
        "cache-full-learned",
        clients(14, requests(fixed(400), uniform(100, 200))),
        (DOUBLED, MEMORY),
        "kv_cache",
        engine=SMALL_CACHE,
        learns=True,
    ),
    Scenario(
        "cache-full-unlogged",
        clients(12, requests(fixed(300), uniform(150, 300))),
        (DOUBLED, MEMORY),
        "kv_cache",
        engine=SMALL_CACHE,
        replica=UNLOGGED,
    ),
    Scenario(
        "cache-shrunk",
        then(fails("kv_small"), clients(14, requests(fixed(400), uniform(100, 200)))),
        (DOUBLED, MEMORY),
        "kv_cache",
        engine={"max_model_len": 2048},
    ),
)

ERRORS = (
    Scenario("out-of-memory", fails("out_of_memory"), (FAILED,)),
    Scenario("out-of-memory-unlogged", fails("out_of_memory"), (FAILED,), replica=UNLOGGED),
    Scenario("out-of-memory-busy", then(traffic(10.0), 20.0, fails("out_of_memory")), (FAILED,), due=20.0),
    Scenario("cuda", fails("cuda"), (FAILED,)),
    Scenario("cuda-unlogged", fails("cuda"), (FAILED,), replica=UNLOGGED),
    Scenario("collective", fails("collective"), (FAILED,)),
    Scenario("engine-dead", fails("engine_dead"), (FAILED,)),
    Scenario("engine-dead-idle", fails("engine_dead"), (FAILED,), calm=lambda: None),
    Scenario("engine-dead-learned", fails("engine_dead"), (FAILED,), learns=True),
    Scenario("engine-dead-scrape-gaps", then(fails("engine_dead"), gaps()), (FAILED,)),
    Scenario("engine-dead-sidecar-restart", then(fails("engine_dead"), restarts_sidecar), (FAILED,)),
    Scenario("engine-dead-and-back", then(fails("engine_dead"), 6.0, comes_back), (FAILED,)),
    Scenario("worker-dead", fails("worker_dead"), (FAILED,)),
    Scenario("worker-dead-unlogged", fails("worker_dead"), (FAILED,), replica=UNLOGGED),
    Scenario("step-timed-out", fails("timeout"), (FAILED,)),
    Scenario("crash-loop", then(*(fails("cuda"), 5.0, comes_back, 25.0) * 3), (FAILED,)),
    Scenario("killed-unsaid", vanishes, (FAILED,)),
    Scenario("killed-unlogged", vanishes, (FAILED,), replica=UNLOGGED),
    Scenario("killed-idle", vanishes, (FAILED,), calm=lambda: None),
    # Silence is no failure before it has lasted three minutes.
    Scenario("silent", falls_silent, (FAILED,), due=18.0),
    Scenario("silent-unlogged", falls_silent, (FAILED,), replica=UNLOGGED, due=18.0),
    Scenario("hang", fails("hang"), (STALLED,), calm=lambda: poisson(6.0), engine=PATIENT),
    Scenario("hang-calm", fails("hang"), (STALLED,), calm=one_at_a_time, engine=PATIENT),
    Scenario("hang-unlogged", fails("hang"), (STALLED,), calm=one_at_a_time, replica=UNLOGGED, engine=PATIENT),
    Scenario(
        "hang-learned", then(traffic(6.0), 10.0, fails("hang")), (STALLED,), due=10.0, learns=True, engine=PATIENT
    ),
    Scenario(
        "hang-sidecar-restart",
        then(fails("hang"), 5.0, restarts_sidecar),
        (STALLED,),
        calm=one_at_a_time,
        engine=PATIENT,
    ),
    # Its gauges are those of the last step, with nobody in it: until clients or the engine give up there is no sign of it.
    Scenario("hang-idle", hangs_idle_and_clients_give_up, (STALLED,), due=36.0, engine=PATIENT),
    Scenario(
        "hang-idle-unlogged", hangs_idle_and_clients_give_up, (STALLED,), replica=UNLOGGED, due=36.0, engine=PATIENT
    ),
    Scenario("hang-unseen", hangs_idle, (FAILED,), due=30.0, engine={"execute_timeout_seconds": 30.0}),
    Scenario("hang-overloaded", then(traffic(30.0), 30.0, fails("hang")), (DOUBLED, STALLED), due=30.0, engine=PATIENT),
    Scenario("all-fail", then(load(lambda: None), answers(500, 1.0)), (RATE,)),
    Scenario("all-fail-at-night", then(load(lambda: None), answers(500, 0.2)), (RATE,), due=15.0),
    Scenario("half-fail", answers(500, 1.0), (RATE,)),
    # So few are judged by the whole of the fast window.
    Scenario("one-in-ten-fails", then(traffic(6.0), answers(500, 0.7)), (RATE,), due=20.0),
    Scenario("one-in-ten-fails-unlogged", then(traffic(6.0), answers(500, 0.7)), (RATE,), replica=UNLOGGED, due=20.0),
    Scenario("burst-of-errors", answers(500, 20.0, 5.0), (RATE,)),
    Scenario("streams-break", then(traffic(6.0), streams_break(0.7)), (RATE,), due=20.0),
    Scenario(
        "refused-for-a-full-queue",
        traffic(40.0),
        (RATE, DOUBLED),
        engine={"max_queued_requests": 8},
    ),
)

MEMORY_INCIDENTS = (
    Scenario("leak", leaks(2.5e8), (MEMORY,), learns=True, after=30, due=5.0),
    Scenario("leak-pinned", leaks(2.5e8), (MEMORY,), after=30, due=5.0, calm_seconds=RESTED),
    Scenario("leak-slow", leaks(3e7), (MEMORY,), after=120, due=36.0, calm_seconds=RESTED),
    Scenario("leak-over-hours", leaks(8e6), (MEMORY,), after=360, due=135.0, calm_seconds=RESTED),
    Scenario("leak-idle", then(load(lambda: None), leaks(1e8)), (MEMORY,), after=60, due=11.0, calm_seconds=RESTED),
    Scenario("leak-unlogged", leaks(1e8), (MEMORY,), replica=UNLOGGED, after=60, due=11.0, calm_seconds=RESTED),
    Scenario("leak-busy", then(traffic(6.0), leaks(1e8)), (MEMORY,), after=60, due=11.0, calm_seconds=RESTED),
    Scenario("leak-scrape-gaps", then(leaks(1e8), gaps(4)), (MEMORY,), after=60, due=11.0, calm_seconds=RESTED),
    Scenario("leak-to-the-end", leaks(2e8), (FAILED, MEMORY), after=90, due=48.0, calm_seconds=RESTED),
    Scenario("leak-at-once", leaks(4e9), (FAILED,), after=60, calm_seconds=RESTED),
    Scenario("too-little-free", engine=LEAST_FREE, pages=(MEMORY,)),
    Scenario("too-little-free-unlogged", engine=LEAST_FREE, pages=(MEMORY,), replica=UNLOGGED),
)

SCENARIOS = (*QUIET, *LATENCY, *ERRORS, *MEMORY_INCIDENTS)
