"""A ramp: level after level of closed-loop load on a server, until a stop line is crossed or somebody ends it."""

import msgspec

from exporter.load.bench import Bench
from exporter.load.cause import cause
from exporter.load.level import Pass, steady, summary
from exporter.load.result import Run
from exporter.load.verdict import Search
from exporter.strictyaml import ConfigError


async def ramp(bench: Bench, search: Search) -> Run:
    """Drive *search* on the server until it knows, or may not go on."""
    passes: dict[int, list[Pass]] = {}
    await bench.prepare()
    search.limits = bench.limits
    conditions, identity = await bench.describe()
    while (concurrency := search.next()) is not None:
        if bench.over:
            search.stop(bench.over)
            break
        if passes and bench.plan.reset is not None:
            try:
                await bench.prepare()
            except ConfigError as error:
                search.stop(str(error))
                break
        measured = await bench.measure(concurrency)
        if not measured.requests:
            search.stop(bench.over or "no request was answered")
            break
        passes.setdefault(concurrency, []).append(measured)
        is_first = concurrency == search.levels[0]
        last, pooled = summary([measured]), (steady if is_first else summary)(passes[concurrency])
        why = "" if is_first else cause(pooled, search.measured[search.levels[0]])
        pooled = msgspec.structs.replace(pooled, cause=why)
        search.tell(last, pooled)
        bench.report.level(pooled, search.measured[search.levels[0]])
        if not measured.complete and not pooled.errors:
            search.stop(bench.over)
        failure = next((r for r in measured.requests if r.error), None)
        if pooled.errors and not await bench.alive():
            search.stop(f"the engine does not answer any more ({failure.detail if failure else ''})")
        elif failure is not None:
            said = " ".join(failure.detail.split())  # which may be a page of HTML
            bench.notes.append(f"{failure.error} at concurrency {concurrency}, the first of them: {said}")
    search.notes += dict.fromkeys(bench.notes)
    limits = {name: getattr(search.limits, name) for name in search.limits.__dataclass_fields__}
    limits |= {} if search.line is None else {"latency_seconds": search.line}
    levels = [search.measured[n] for n in sorted(search.measured)]
    return Run(conditions, levels, search.levels[0], limits, search.verdict(), identity)
