"""What a GPU's memory holds, what is left of it, and what it rests at, knowing that engines set memory aside.

The use of a GPU under an engine that pre-allocates is flat by design, so free memory alone says little: the unused part
of its KV cache is room too, and growth above the resting use is what leads to running out.

    gauges = store.gauges(up=lifecycle.up)
    headroom.samples(gauges)        # to be exported beside them

Nobody tells which rank is on which GPU. The GPUs watched are taken for the engine's: ranks and GPUs go by the order of
their numbers, as many GPUs to each rank. Of an engine that spans more GPUs than are watched, only what is alike on all
its ranks is known; of one that uses fewer, nothing.
"""

import math
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from statistics import median

from exporter import catalog
from exporter.catalog import Family
from exporter.concurrency import WARM_UP_REQUESTS, WARM_UP_SECONDS
from exporter.engines.profile import Profile
from exporter.lifecycle import Lifecycle
from exporter.signals import Gauges, Sample
from exporter.store import Store

_RESTING_SECONDS = 300.0


class Headroom:
    """Looks at the GPUs' memory every *interval* seconds, as *tick* waits, and learns what each rests at.

    The plateau is the median use (bytes) in the first 5 minutes of serving that are seen after the warm-up: 60 s and 20
    requests, whichever ends later. It holds until the engine's next start. *profile* is how the engine is read now.
    """

    def __init__(
        self,
        store: Store,
        lifecycle: Lifecycle,
        profile: Callable[[], Profile | None],
        *,
        interval: float,
        tick: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._lifecycle = lifecycle
        self._profile = profile
        self._tick = tick
        self._warm_up = math.ceil(WARM_UP_SECONDS / interval)
        self._resting = math.ceil(_RESTING_SECONDS / interval)
        self._forget()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await self._tick()

    def look(self) -> None:
        """Take note of what is in use now, if the engine serves and is warm."""
        if self._lifecycle.lives != self._life:
            self._forget()
        if self._lifecycle.phase != "serving":
            return
        self._looks += 1
        if self._looks <= self._warm_up or _answered(self._store) - self._before < WARM_UP_REQUESTS:
            return
        for (_, uuid), used in self._store.gauges().get(catalog.GPU_USED, {}).items():
            if uuid not in self._plateaus:
                self._seen[uuid].append(used)
                if len(self._seen[uuid]) >= self._resting:
                    self._plateaus[uuid] = median(self._seen.pop(uuid))

    def samples(self, gauges: Gauges) -> list[Sample]:
        """What follows from the *gauges* known now, and the plateaus of the GPUs that tell their use."""
        profile = self._profile()
        reserves = _preallocates(gauges, profile.preallocates if profile else None)
        samples = list(_memory(gauges, reserves is not False))
        if reserves is not None:
            samples.append(Sample(catalog.ENGINE_PREALLOCATES, (), float(reserves)))
        if self._lifecycle.lives == self._life:
            known = (labels for labels in gauges.get(catalog.GPU_USED, {}) if labels[1] in self._plateaus)
            samples += [Sample(catalog.GPU_PLATEAU, labels, self._plateaus[labels[1]]) for labels in known]
        return samples

    def _forget(self) -> None:
        """Another life of the engine begins: what was learnt in the last one holds no longer."""
        self._life = self._lifecycle.lives
        self._before = _answered(self._store)
        self._looks = 0  # while it serves
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._plateaus: dict[str, float] = {}


def _answered(store: Store) -> float:
    """Requests that ended well until now; by their first tokens, where the engine tells of no ends."""
    ended = sum(value for (_, outcome), value in store.counters[catalog.REQUESTS].items() if outcome == "ok")
    return max(ended, sum(each.cumulative()[-1] for each in store.histograms[catalog.FIRST_TOKEN].values()))


def _preallocates(gauges: Gauges, told: bool | None) -> bool | None:
    """Whether the engine takes its memory when it starts: by its profile, else if it named a share or a pool."""
    fraction = ("gpu_memory_utilization",) in gauges.get(catalog.ENGINE_LIMIT, {})
    return True if told is None and (fraction or catalog.KV_BYTES in gauges) else told


def _memory(gauges: Gauges, reserves: bool) -> Iterator[Sample]:
    """Parts and effective headroom of each GPU that tells its use. *reserves*: the KV cache is part of that use."""
    gpus = sorted(gauges.get(catalog.GPU_UP, {}), key=lambda labels: _numbers(labels[0]))  # lost ones keep their place
    weights = _by_rank(gauges, catalog.RANK_WEIGHTS)
    pools = _by_rank(gauges, catalog.KV_BYTES) if reserves else {}
    usages = _by_rank(gauges, catalog.KV_USAGE)
    if pools.keys() != usages.keys():
        usages = {}  # of other pools than those that are known
    workers = _workers(gauges, weights)
    columns = (_on_each(values, len(gpus), workers) for values in (weights, pools, usages))
    for labels, weight, pool, usage in zip(gpus, *columns, strict=True):
        used = gauges.get(catalog.GPU_USED, {}).get(labels)
        if used is None:
            continue
        parts = _parts(used, weight, pool, usage)
        for part, value in parts.items():
            yield Sample(catalog.GPU_PART, (*labels, part), value)
        if (free := gauges.get(catalog.GPU_HEADROOM, {}).get(labels)) is not None:
            yield Sample(catalog.GPU_EFFECTIVE, labels, free + parts.get("kv_free", 0.0))


def _parts(used: float, weight: float | None, pool: float | None, usage: float | None) -> dict[str, float]:
    """*used* bytes by what they hold, as far as known; the rest is other.

    What is said to be there and does not fit is not there: not yet, not any more, or on another GPU.
    """
    parts = {}
    if weight is not None:
        parts["weights"] = weight
    if pool is not None and usage is not None:
        parts["kv_used"] = min(usage, 1.0) * pool
        parts["kv_free"] = pool - parts["kv_used"]
    if sum(parts.values()) > used:
        parts = {}
    return parts | {"other": used - sum(parts.values())}


def _by_rank(gauges: Gauges, family: Family) -> dict[str, float]:
    """The values of *family* by rank; none if several models share a rank, for each has memory of its own."""
    series = gauges.get(family, {})
    ranks = {labels[-1]: value for labels, value in series.items()}
    return ranks if len(ranks) == len(series) else {}


def _workers(gauges: Gauges, weights: Mapping[str, float]) -> int | None:
    """How many GPUs the engine uses: its workers told their weights, or it told how it is split. None: not known."""
    split = {dimension: ways for (dimension,), ways in gauges.get(catalog.PARALLELISM, {}).items()}
    if len(weights) > 1:
        return len(weights)
    if "tensor" not in split:
        return None
    return int(math.prod(split.get(dimension, 1) for dimension in ("tensor", "pipeline", "data")))


def _on_each(values: Mapping[str, float], gpus: int, workers: int | None) -> list[float | None]:
    """The value on each of *gpus*, which are in order; None where the ranks cannot be matched with them."""
    if values and gpus <= (workers or gpus):
        if len(set(values.values())) == 1:
            return [next(iter(values.values()))] * gpus
        if gpus == (workers or gpus) and gpus % len(values) == 0:
            ranks = sorted(values, key=_numbers)
            return [values[ranks[n * len(ranks) // gpus]] for n in range(gpus)]
    return [None] * gpus


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]
