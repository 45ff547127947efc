"""The loads on which the accuracy is measured: seeded, five minutes each, from idle to twice saturated.

Three engines: Hy3 on eight H20 (64 places, steps of 25 to 60 ms and of 0.2 s while it reads prompts), a smaller model
on a fast GPU (128 places, steps of 8 to 20 ms) and a toy with eight places. Their rates are multiples of what each can
serve of the mix.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from exporter.simulator import EngineConfig
from exporter.simulator.load import (
    CHAT,
    Bursts,
    ClosedLoop,
    Load,
    Mix,
    OpenLoop,
    Poisson,
    Segment,
    lognormal,
    mixture,
    requests,
    uniform,
)

SECONDS = 300.0

SHORT = requests(lognormal(200, 0.5, most=2000), uniform(8, 80))
LONG = requests(lognormal(4000, 0.6, most=16_000), lognormal(60, 0.5, most=400))
MIXED = mixture((0.9, SHORT), (0.1, LONG))

HY3 = EngineConfig.hy3_h20()
FAST = EngineConfig.hy3_h20(
    model="fast",
    max_batched_tokens=8192,
    step_base_seconds=0.008,
    step_per_decode_seconds=0.0003,
    step_per_prefill_token_seconds=0.00001,
)
TOY = EngineConfig.tiny(
    max_model_len=16_384,
    max_batched_tokens=2048,
    kv_blocks=8192,
    kv_bytes_per_token=2**15,
)


@dataclass(frozen=True, slots=True)
class Case:
    """One load on one engine; *bounds* names the engine whose bucket bounds the page has."""

    name: str
    engine: EngineConfig
    load: Callable[[], Load]
    seed: int
    bounds: str = "vllm"


def _engines() -> Iterator[tuple[str, EngineConfig, Mix, float]]:
    """Name, engine, mix and about how many requests a second of that mix it can serve."""
    yield "hy3", HY3, CHAT, 3.3
    yield "hy3-short", HY3, SHORT, 14.0
    yield "hy3-mixed", HY3, MIXED, 8.5
    yield "fast", FAST, CHAT, 9.0
    yield "fast-short", FAST, SHORT, 45.0
    yield "toy", TOY, SHORT, 24.0


def cases(seed: int = 0) -> Iterator[Case]:
    """All of them, with the seeds from the one after *seed* on."""
    for name, engine, mix, most in _engines():
        for what, load in (*_loads(mix, most), *_idle(name, mix)):
            seed += 1
            yield Case(f"{name} {what}", engine, partial(load, seed=seed), seed)
    for bounds, names in (("sglang", ("hy3-short", "toy")), ("tgi", ("hy3-mixed", "fast"))):
        for name, engine, mix, most in _engines():
            if name in names:
                for what, load in _loads(mix, most):
                    if what in ("steady 0.5", "steady 0.95", "bursts", "run-up and drain"):
                        seed += 1
                        yield Case(f"{bounds}: {name} {what}", engine, partial(load, seed=seed), seed, bounds)


def _idle(name: str, mix: Mix) -> Iterator[tuple[str, Callable[..., Load]]]:
    if name in ("hy3", "hy3-mixed"):
        yield "idle, 0.5/s", partial(Poisson, 0.5, mix=mix)


def _loads(mix: Mix, most: float) -> Iterator[tuple[str, Callable[..., Load]]]:
    for share in (0.5, 0.8, 0.95, 1.1, 2.0):
        yield f"steady {share:g}", partial(Poisson, share * most, mix=mix)
    burst = max(2, round(4 * most))
    yield "bursts", partial(Bursts, burst, 15.0, mix=mix)
    yield "small bursts", partial(Bursts, max(2, round(most)), 3.0, mix=mix)
    wave = (Segment(60, 0.3 * most), Segment(60, 0.3 * most, 2 * most), Segment(30, 2 * most), Segment(150, 0.3 * most))
    yield "run-up and drain", partial(OpenLoop, *wave, mix=mix)
    peaks = [Segment(20, 0.4 * most), Segment(10, 2.5 * most)] * 10
    yield "peaks", partial(OpenLoop, *peaks, mix=mix)
    yield "12 clients", partial(ClosedLoop, 12, mix=mix)
    yield "80 clients", partial(ClosedLoop, 80, mix=mix)
