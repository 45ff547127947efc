"""Numbers and names as a tired person reads them."""

from exporter.judge import gib

STATES = {"ok": "Calm", "rising": "Rising", "tripped": "Stop line", "unknown": "Cannot be judged"}
LINES = {"latency": "Latency", "errors": "Errors", "memory": "Memory"}
CAUSES = {
    "queue": "requests wait in the queue",
    "step": "each step of the engine got slower",
    "kv_cache": "the KV cache is full",
    "communication": "the GPUs wait for each other",
    "request_mix": "requests are longer than before",
    "headroom": "a GPU has hardly any free memory",
    "used_ratio": "a GPU's memory is nearly full",
    "growth": "memory grew above its resting use",
    "out_of_memory": "the engine ran out of memory",
    "cuda": "a CUDA error",
    "collective": "the GPUs' communication failed",
    "engine_dead": "the engine died",
    "phase_dead": "the engine died without a word",
    "silent": "the engine does not answer any more",
    "stalled": "the engine stands still",
    "ratio": "too many requests fail",
    "timeout": "timeouts",
    "connection": "connections were cut",
    "hang": "the engine hangs",
    "rejected": "requests are rejected",
    "server_error": "the server answers with 5xx",
    "other": "an error of another kind",
}
BASELINES = {
    "pinned": "pinned",
    "learned": "learned here, while calm, since Stopline started",
    "provisional": "provisional: of the first calm requests, until these are an hour old",
}


def seconds(value: float | None) -> str:
    """With its unit, never apart at the end of a line; a dash for what is not known."""
    if value is None:
        return "–"
    if value < 0.01:
        return f"{value * 1000:.1f}\u00a0ms"
    if value < 1:
        return f"{value * 1000:.0f}\u00a0ms"
    return f"{value:.2f}\u00a0s" if value < 10 else f"{value:.0f}\u00a0s"


def tick(value: float) -> str:
    """Seconds at an axis, without digits that say nothing."""
    return f"{value:g}\u00a0s" if value >= 1 else f"{value * 1000:g}\u00a0ms"


def short_gib(value: float | None) -> str:
    """Bytes in GiB; a dash for what is not known."""
    return "–" if value is None else gib(value)


def ago(value: float) -> str:
    """So many seconds ago."""
    if value < 90:
        return f"{value:.0f}\u00a0s ago"
    return f"{value / 60:.0f}\u00a0min ago" if value < 5400 else f"{value / 3600:.0f}\u00a0h ago"
