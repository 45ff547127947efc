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
            Gpu(
                "2",
                "GPU-2",
                "H20",
                True,
                96 * GIB,
                90 * GIB,
                4 * GIB,
                90 * GIB,
                85 * GIB,
                limit_bytes=86 * GIB,
                over_bytes=4 * GIB,
            ),
        ),
        past=Past(
            (900.0, 30.0, 15.0, 0.0),
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


def calm() -> State:
    """Nothing is near its line, and everything is known."""
    latency, _, memory = incident().lines
    return replace(
        incident(),
        lines=(
            replace(latency, state="ok", value=2.2, cause="", alert="", says="P99 is 1.1 times its baseline."),
            Verdict("errors", "ok", "None within an hour.", "errors", 0.0, 1.0),
            memory,
        ),
        gpus=incident().gpus[:1],
        past=replace(incident().past, errors=(0.0, 0.0, 0.0, 0.0)),
        sources=(Source("metrics", ok=True, last_success=AT), Source("/var/log/x", ok=True, last_success=AT)),
    )


def errors() -> State:
    """The engine died: errors are over their line, and nothing else can be judged."""
    says = "The engine is not up (phase: dead). Nothing listens at engine.url."
    latency, _, memory = calm().lines
    blind = {"state": "unknown", "value": None, "says": says, "remedy": "Compare host and port."}
    return replace(
        calm(),
        engine=replace(calm().engine, phase="dead", up=False, running=None, waiting=None, kv_usage_ratio=None),
        lines=(
            replace(latency, **blind),
            Verdict(
                "errors",
                "tripped",
                "The engine has failed: 1 × out_of_memory.",
                "errors",
                1.0,
                1.0,
                cause="out_of_memory",
                reasons=("out_of_memory",),
                alert="StoplineEngineFailed",
            ),
            replace(memory, **blind),
        ),
        gpus=tuple(
            replace(gpu, used_bytes=GIB, free_bytes=93 * GIB, parts_bytes={"other": GIB}) for gpu in calm().gpus
        ),
    )


def memory() -> State:
    """A GPU has hardly anything free, and requests were evicted."""
    *others, line = calm().lines
    full = {"used_bytes": 93.5 * GIB, "peak_bytes": 93.6 * GIB, "free_bytes": 0.5 * GIB}
    over = {"state": "tripped", "value": 0.4 * GIB, "says": "A GPU has only 0.4 GiB free.", "cause": "headroom"}
    return replace(
        calm(),
        lines=(*others, replace(line, **over, reasons=("headroom",), alert="StoplineMemoryNearLimit")),
        gpus=tuple(replace(gpu, **full) for gpu in calm().gpus),
    )
