"""States of the live page for tests: a quiet one that knows nothing, and one of an incident, with hostile names."""

from dataclasses import replace

from exporter.judge import Verdict
from exporter.live.state import Capacity, Engine, Gpu, Level, Past, Source, State

AT = 1_800_000_000.0
HOSTILE = "<script>alert('1')</script>\" onload=\"alert(2)"
GIB = float(1 << 30)


def quiet() -> State:
    """Right after a start: nothing is known, and nothing looks calm."""
    nothing = "No request has ended within the last half hour."
    return State(
        version="0.0",
        at=AT,
        engine=Engine("", "", "", "", "starting", False, None, None, None, None),
        lines=(
            Verdict("latency", "unknown", nothing, "seconds", remedy="Wait."),
            Verdict("errors", "unknown", "Neither a log nor a page has been read yet.", "errors", remedy="Give one."),
            Verdict(
                "memory", "unknown", "No GPU is seen: no NVIDIA driver library in sight.", "bytes", remedy="Inject it."
            ),
        ),
        gpus=(),
        past=Past(),
        capacity=Capacity(),
        sources=(
            Source("metrics", ok=False, reason="not_tried", cause="not tried yet"),
            Source(
                "gpu", ok=False, reason="library_not_found", cause="no library", remedy="inject it", last_success=None
            ),
        ),
    )


def incident() -> State:
    """The latency line is over, an error was an hour's half ago, one of two GPUs is lost; names would like to be code."""
    return replace(
        quiet(),
        engine=Engine(
            "vllm", "0.32.0", HOSTILE, "0a1b2c3d", "serving", True, AT - 7200, 62.0, 96.0, 0.5, (("Type", HOSTILE),)
        ),
        lines=(
            Verdict(
                "latency",
                "tripped",
                "P99 is 4.0 times its baseline; the line is at 2.",
                "seconds",
                8.0,
                4.0,
                3.0,
                2.0,
                "learned",
                HOSTILE,
                cause="queue",
                alert="StoplineLatencyDoubled",
            ),
            Verdict(
                "errors",
                "rising",
                "None within five minutes; the last one was 30 minutes ago.",
                "errors",
                0.0,
                1.0,
                reasons=("timeout",),
                alert="StoplineErrorsAppeared",
            ),
            Verdict("memory", "ok", "The fullest GPU has 8.0 GiB free.", "bytes", 8 * GIB, GIB, gpu="0"),
        ),
        gpus=(
            Gpu(
                "0",
                "GPU-0",
                "H20",
                True,
                96 * GIB,
                86 * GIB,
                8 * GIB,
                87 * GIB,
                85 * GIB,
                16 * GIB,
                86 * GIB,
                {"weights": 68 * GIB, "kv_used": 8 * GIB, "kv_free": 8 * GIB, "other": 2 * GIB},
            ),
            Gpu("1", "GPU-1", "H20", False),
        ),
        past=Past(
            (45.0, 30.0, 15.0, 0.0),
            (None, 0.001, 0.002, 2.0),
            (None, 0.002, 0.1, 5.0),
            (0.03, None, 0.03, 0.03),
            (0.04, None, 0.05, 0.05),
            (2.0, 2.0, 4.0, 8.0),
            (1.0, 2.0, 62.0, 62.0),
            (0.0, 0.0, 20.0, 96.0),
            (0.0, 0.0, 1.0, 0.0),
        ),
        capacity=Capacity(
            HOSTILE,
            (Level("1", 200, 2.0, 50.0, True), Level("16", 900, 4.5, 400.0, True), Level("inf", 3, 9.0, None, False)),
            4.0,
            "1",
            "16",
        ),
        sources=(
            Source("metrics", ok=True, last_success=AT),
            Source(HOSTILE, False, "missing", "there is no such file", "compare the path", AT - 600),
        ),
        pinned={"queue_wait": 0.002},
    )
