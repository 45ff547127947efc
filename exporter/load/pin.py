"""A ramp's baseline as the sidecar's pins (`stopline run --pin FILE`)."""

from collections.abc import Iterator
from pathlib import Path

import yaml

from exporter.baseline import Pin
from exporter.load.result import Run

_QUANTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))


def pins(run: Run) -> tuple[Pin, ...]:
    """The quantiles of the level that is the baseline; those of a failed request are left out, or all if it tripped."""
    return () if unfit(run) else tuple(_pins(run))


def unfit(run: Run) -> str:
    """Why the baseline of *run* is none to hold a server to; empty if it is one."""
    tripped = run.verdict.tripped if run.verdict is not None else None
    if tripped is not None and tripped.concurrency == run.baseline:
        return f"the {tripped.line} line was crossed at the baseline, concurrency {run.baseline}: {tripped.why}"
    if not run.levels:
        return "no level was measured"
    level = run.level(run.baseline) if run.baseline is not None else None
    if level is not None and not level.complete:
        return f"the baseline, concurrency {run.baseline}, was cut short after {level.requests} requests"
    return ""


def _pins(run: Run) -> Iterator[Pin]:
    level = run.level(run.baseline) if run.baseline is not None else None
    if level is None:
        return
    model = run.identity.get("model") or str(run.conditions.get("model", ""))
    config = run.identity.get("config", "")
    signals = {"request": level.latency, "time_to_first_token": level.first_token}
    if level.engine is not None:
        signals["queue_wait"] = level.engine.queue_wait
    for signal, quantiles in signals.items():
        for q, name in _QUANTILES:
            value = getattr(quantiles, name)
            if value is not None and 0 < value < float("inf"):
                yield Pin(signal, q, value, model, config)  # type: ignore[arg-type]
    if level.engine is not None:
        for phase in ("decode", "mixed"):
            if step := level.engine.steps.get(phase):
                yield Pin("step", 0.5, step.p50, model, config)  # type: ignore[arg-type]
                yield Pin("step", 0.99, step.p99, model, config)  # type: ignore[arg-type]
                return


def write(path: Path, run: Run) -> int:
    """The pins of *run* as the file at *path*, replaced at once; how many they are. Raises OSError.

    Where they are none to hold a server to, a file that is there stays as it is.
    """
    if unfit(run):
        return 0
    rows = []
    for pin in pins(run):
        row: dict[str, object] = {
            "signal": pin.signal,
            "quantile": pin.quantile,
            "seconds": _ms(pin.seconds),
        }
        row |= {"model": pin.model} if pin.model else {}
        row |= {"config": pin.config} if pin.config else {}
        rows.append(row)
    head = (
        f"# P50 to P99 at concurrency {run.baseline}, measured by stopline ramp. For: stopline run --pin {path.name}\n"
    )
    new = path.with_name(f".{path.name}.new")
    new.write_text(head + yaml.safe_dump({"pins": rows}, sort_keys=False), encoding="utf-8")
    new.replace(path)
    return len(rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3f}ms"
