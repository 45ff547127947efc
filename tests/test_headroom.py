"""What the memory of a GPU holds and rests at, from captures of engines and from any numbers at all."""

import asyncio
from pathlib import Path

import aiohttp
import pytest
from harness import Reader
from hypothesis import given
from hypothesis import strategies as st
from realengine import Page
from test_end_to_end import Engine, Run

from exporter import catalog
from exporter.catalog import Family
from exporter.config import Config, EngineConfig, GpuConfig, LogConfig
from exporter.engines import profile as profiles
from exporter.engines.profile import Profile
from exporter.headroom import Headroom
from exporter.lifecycle import Lifecycle
from exporter.sidecar import Sidecar
from exporter.signals import Labels, Reading, Sample
from exporter.store import Store, gauge

FIXTURES = Path(__file__).parent / "fixtures"
GIB = float(1 << 30)
TOTAL, RESERVED = 96 * GIB, GIB
Gauges = dict[Family, dict[Labels, float]]


def gpu_reading(*used: float | None) -> Reading:
    """GPUs with so many GiB in use; None is one that is lost."""
    samples = []
    for index, gib in enumerate(used):
        labels = (str(index), f"GPU-{index}")
        samples.append(gauge(catalog.GPU_UP, float(gib is not None), *labels))
        if gib is not None:
            samples += [
                gauge(catalog.GPU_TOTAL, TOTAL, *labels),
                gauge(catalog.GPU_RESERVED, RESERVED, *labels),
                gauge(catalog.GPU_USED, gib * GIB, *labels),
                gauge(catalog.GPU_HEADROOM, TOTAL - RESERVED - gib * GIB, *labels),
            ]
    return Reading("gpu", "gpu", ok=True, at=0.0, samples=tuple(samples))


async def _never() -> None:
    raise AssertionError("looks are taken by hand")


class Watch:
    """An engine's sidecar in which looks are taken by hand, one for each minute of the spans that it learns from."""

    def __init__(self, engine: str = "vllm", *, profile: Profile | None = None, interval: float = 60.0) -> None:
        self.store = Store()
        self.life = Lifecycle(has_page=True)
        self.headroom = Headroom(
            self.store,
            self.life,
            lambda: profile or profiles.bundled(engine),
            interval=interval,
            tick=_never,
        )

    def serve(self, requests: int = 20) -> "Watch":
        self.life.enter("serving")
        self.life.answered(healthy=True, moved=True, started_at=None)
        self.store.count(catalog.REQUESTS, ("m", "ok"), requests, origin="metrics")
        return self

    def gpus(self, *used: float | None) -> "Watch":
        self.store.publish(gpu_reading(*used))
        return self

    def tell(self, *samples: Sample, source: str = "metrics") -> "Watch":
        origin = "metrics" if source == "metrics" else "log"
        self.store.publish(Reading(source, origin, ok=True, at=0.0, samples=samples))
        return self

    def look(self, *used: float, times: int = 1) -> "Watch":
        for _ in range(times):
            self.gpus(*used)
            self.headroom.look()
        return self

    @property
    def gauges(self) -> Gauges:
        known = self.store.gauges(up=self.life.up)
        for sample in self.headroom.samples(known):
            known.setdefault(sample.family, {})[sample.labels] = sample.value
        return known

    def plateaus(self) -> dict[str, float]:
        return {gpu: value / GIB for (gpu, _), value in self.gauges.get(catalog.GPU_PLATEAU, {}).items()}

    def effective(self) -> dict[str, float]:
        return {gpu: round(v / GIB, 3) for (gpu, _), v in self.gauges.get(catalog.GPU_EFFECTIVE, {}).items()}

    def parts(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for (gpu, _, part), value in self.gauges.get(catalog.GPU_PART, {}).items():
            found.setdefault(gpu, {})[part] = round(value / GIB, 3)
        return found


def kv(usage: float | None = None, pool: float | None = None, rank: str = "0", model: str = "m") -> list[Sample]:
    """What the engine tells of its KV cache: the share in use, and its size in GiB."""
    samples = [] if usage is None else [gauge(catalog.KV_USAGE, usage, model, rank)]
    return samples if pool is None else [*samples, gauge(catalog.KV_BYTES, pool * GIB, model, rank)]


def weights(**gib: float) -> list[Sample]:
    return [gauge(catalog.RANK_WEIGHTS, value * GIB, rank.strip("r").replace("_", ".")) for rank, value in gib.items()]


def split(**ways: int) -> list[Sample]:
    return [gauge(catalog.PARALLELISM, float(n), dimension) for dimension, n in ways.items()]


# what is in use and what is left


def test_a_gpu_at_ninety_percent_has_the_unused_part_of_its_cache_left() -> None:
    watch = Watch().serve().gpus(88).tell(*kv(usage=0.25, pool=40), *weights(r0=30))
    assert watch.parts() == {"0": {"weights": 30, "kv_used": 10, "kv_free": 30, "other": 18}}
    assert watch.effective() == {"0": 7 + 30}


def test_without_a_known_pool_effective_headroom_is_free_memory() -> None:
    watch = Watch().serve().gpus(88).tell(*kv(usage=0.25), *weights(r0=30))
    assert watch.parts() == {"0": {"weights": 30, "other": 58}}
    assert watch.effective() == {"0": 7}


def test_nothing_told_at_all_is_all_other() -> None:
    watch = Watch("generic").gpus(88)
    assert (watch.parts(), watch.effective()) == ({"0": {"other": 88}}, {"0": 7})


@pytest.mark.parametrize("how", ["page down", "dead", "never told"])
def test_a_pool_whose_use_is_unknown_is_in_other(how: str) -> None:
    watch = Watch().serve().gpus(88).tell(*kv(usage=0.25, pool=40)).tell(*weights(r0=30), *kv(pool=40), source="log")
    if how == "page down":
        watch.store.publish(Reading("metrics", "metrics", ok=False, at=1.0, reason="timeout"))
        watch.life.silent(refused=False)
    elif how == "dead":
        watch.life.silent(refused=True)
    else:
        watch.tell(*kv(pool=40))
    assert watch.parts() == {"0": {"weights": 30, "other": 58}}
    assert watch.effective() == {"0": 7}


def test_a_dead_engine_whose_memory_is_free_again_holds_nothing() -> None:
    watch = Watch().serve().tell(*kv(usage=0.5, pool=40), *weights(r0=30)).gpus(0.5)
    assert (watch.parts(), watch.effective()) == ({"0": {"other": 0.5}}, {"0": 94.5})


def test_what_is_told_before_it_is_taken_is_not_there_yet() -> None:
    watch = Watch().gpus(31).tell(*kv(usage=0.0, pool=40), *weights(r0=30)).serve()
    assert (watch.parts(), watch.effective()) == ({"0": {"other": 31}}, {"0": 64})


def test_a_usage_above_one_is_all_of_the_pool() -> None:
    watch = Watch().serve().gpus(88).tell(*kv(usage=1.02, pool=40))
    assert watch.parts() == {"0": {"kv_used": 40, "kv_free": 0, "other": 48}}


def test_the_pool_of_an_engine_that_grows_into_it_is_not_in_use_yet() -> None:
    watch = Watch(profile=Profile("own", preallocates=False)).serve().gpus(88).tell(*kv(usage=0.25, pool=40))
    assert (watch.parts(), watch.effective()) == ({"0": {"other": 88}}, {"0": 7})


@given(
    used=st.lists(st.one_of(st.none(), st.floats(0, 95)), max_size=4),
    told=st.lists(st.floats(0, 200), max_size=4),
    pools=st.lists(st.floats(0, 200), max_size=3),
    usages=st.lists(st.floats(0, 1.5), max_size=3),
    dimensions=st.dictionaries(st.sampled_from(["tensor", "pipeline", "data", "expert"]), st.integers(1, 4)),
)
def test_parts_are_never_negative_and_add_up_to_what_is_in_use(used, told, pools, usages, dimensions) -> None:
    watch = Watch().serve().gpus(*used)
    watch.tell(
        *weights(**{f"r{rank}": value for rank, value in enumerate(told)}),
        *(sample for rank, value in enumerate(pools) for sample in kv(pool=value, rank=str(rank))),
        *(sample for rank, value in enumerate(usages) for sample in kv(usage=value, rank=str(rank))),
        *split(**dimensions),
    )
    known = watch.gauges
    sums: dict[Labels, float] = {}
    for (*labels, _), value in known.get(catalog.GPU_PART, {}).items():
        assert value >= 0
        sums[tuple(labels)] = sums.get(tuple(labels), 0.0) + value
    assert sums == pytest.approx(known.get(catalog.GPU_USED, {}))
    for labels, value in known.get(catalog.GPU_EFFECTIVE, {}).items():
        free = known[catalog.GPU_HEADROOM][labels]
        assert free <= value <= free + known[catalog.GPU_USED][labels]
        total = sums[labels] + free
        assert total == pytest.approx(known[catalog.GPU_TOTAL][labels] - known[catalog.GPU_RESERVED][labels])


# which rank is on which GPU


def test_each_gpu_of_a_tensor_parallel_engine_holds_its_own_share() -> None:
    facts = [*weights(r0=7.7, r1=7.6, r2=7.6, r3=7.6), *split(tensor=4, pipeline=1, data=1)]
    watch = Watch().serve().gpus(60, 60, 60, 60).tell(*kv(usage=0.5, pool=26), *facts)
    assert [parts["weights"] for parts in watch.parts().values()] == [7.7, 7.6, 7.6, 7.6]
    assert {parts["kv_used"] for parts in watch.parts().values()} == {13}


def test_ranks_and_gpus_go_by_number_not_by_letter() -> None:
    watch = Watch().serve().gpus(*[60.0] * 12).tell(*weights(**{f"r{n}": float(n) for n in range(12)}))
    assert [parts["weights"] for parts in watch.parts().values()] == [float(n) for n in range(12)]


def test_a_lost_gpu_drops_its_series_and_the_others_keep_their_ranks() -> None:
    told = [*weights(r0=10, r1=11, r2=12), *kv(usage=0.5, pool=20)]
    watch = Watch().serve().look(60, 60, 60, times=6).gpus(60, None, 60).tell(*told)
    assert {gpu: parts["weights"] for gpu, parts in watch.parts().items()} == {"0": 10, "2": 12}
    assert watch.effective().keys() == watch.plateaus().keys() == {"0", "2"}


@pytest.mark.parametrize("facts", [weights(r0=7.6, r1=7.6), split(tensor=2)])
def test_more_gpus_than_workers_cannot_be_matched(facts: list[Sample]) -> None:
    watch = Watch().serve().gpus(60, 60, 60, 60).tell(*kv(usage=0.5, pool=26), *facts)
    assert set(watch.parts()["0"]) == {"other"}
    assert watch.effective() == dict.fromkeys("0123", 35.0)


def test_of_an_engine_on_several_nodes_what_is_alike_everywhere_is_known() -> None:
    told = [*weights(**{f"r{n}": 7.6 for n in range(8)}), *kv(usage=0.5, pool=26), *split(tensor=8)]
    watch = Watch().serve().gpus(60, 60).tell(*told)
    assert watch.parts()["1"] == {"weights": 7.6, "kv_used": 13, "kv_free": 13, "other": 26.4}
    watch.tell(*told, *weights(r8=7.7))
    assert watch.parts()["1"] == {"kv_used": 13, "kv_free": 13, "other": 34}


def test_several_models_on_the_same_gpus_have_pools_that_nobody_can_tell_apart() -> None:
    watch = Watch().serve().gpus(60).tell(*kv(usage=0.5, pool=10, model="a"), *kv(usage=0.1, pool=20, model="b"))
    assert watch.parts() == {"0": {"other": 60}}


@pytest.mark.parametrize(("pools", "used"), [("01", "0"), ("1", "0"), ("0", "01")])
def test_use_and_size_must_be_those_of_the_same_ranks(pools: str, used: str) -> None:
    told = [*(s for rank in pools for s in kv(pool=20, rank=rank)), *(s for rank in used for s in kv(0.5, rank=rank))]
    watch = Watch().serve().gpus(60, 60).tell(*told)
    assert watch.parts() == {"0": {"other": 60}, "1": {"other": 60}}


def test_the_data_parallel_ranks_of_vllm_fill_their_own_gpus() -> None:
    """Two ranks of two GPUs each, as their workers' lines tell."""
    reader = Reader("vllm").feed((FIXTURES / "vllm/constructed-ranks/dp2-tp2-ep4.log").read_bytes())
    watch = Watch().serve().gpus(70, 70, 70, 70).tell(*reader.lines.samples(), source="log")
    watch.tell(*kv(usage=0.5, model="moe"), *kv(usage=0.25, rank="1", model="moe"))
    parts = watch.parts()
    assert [parts[gpu]["weights"] for gpu in "0123"] == [20.25, 20.5, 20.25, 20.5]
    assert [parts[gpu]["kv_used"] for gpu in "0123"] == [21.125, 21.125, 11, 11]


async def told_by(engine: str, log: Path, page: Path, tmp_path: Path, *used: float) -> Page:
    """The exposition of a sidecar beside GPUs with so many GiB in use, after it read a capture's log and page."""
    server, copy = Engine(), tmp_path / "server.log"
    copy.write_bytes((FIXTURES / log).read_bytes())
    server.page = (FIXTURES / page).read_text()
    await server.server.start_server()
    try:
        async with aiohttp.ClientSession() as session:
            at = EngineConfig(name=engine, url=str(server.server.make_url("/")))
            run = Run(session, engine, engine=at, log=LogConfig(paths=(str(copy),)))
            await run.turn()
            run.sidecar.store.publish(gpu_reading(*used))
            return Page(run.exposition())
    finally:
        await server.server.close()


def part(page: Page, name: str) -> list[float]:
    found = page.labelled("gpu_memory_part_bytes", "gpu", part=name)
    return [round(found[gpu] / GIB, 6) for gpu in sorted(found)]


async def test_the_data_parallel_attention_of_sglang_fills_its_own_gpus(tmp_path: Path) -> None:
    """dp 2 lies within tp 4: four GPUs and not eight, two for each rank's cache."""
    ranks = Path("sglang/constructed-ranks")
    page = await told_by("sglang", ranks / "serving.log", ranks / "metrics-busy.txt", tmp_path, 92, 92, 92, 92)
    assert part(page, "weights") == [65.25, 64.5, 64.5, 64.5]
    assert part(page, "kv_used") == [23.765, 23.765, 10.045, 10.045]
    assert page("engine_preallocates_memory") == 1


async def test_a_real_vllm_tells_pool_and_use_on_its_page(tmp_path: Path) -> None:
    """Hy3 on a CPU, so the GPU beside it is made up: a pool of 1 GiB, 8 requests in it."""
    hy3 = Path("vllm/0.32.0-hy3")
    page = await told_by("vllm", hy3 / "startup.log", hy3 / "metrics-queueing.txt", tmp_path, 90)
    used = 0.00146520146520146
    assert part(page, "kv_used") == [round(used, 6)]
    assert part(page, "kv_free") == [round(1 - used, 6)]
    assert part(page, "other") == [89]
    assert page("gpu_memory_effective_headroom_bytes") == pytest.approx((5 + 1 - used) * GIB)
    assert page("engine_preallocates_memory") == 1


# the plateau


def test_the_plateau_is_the_median_of_five_minutes_after_the_warm_up() -> None:
    watch = Watch().serve(requests=20).look(99).look(70).look(70.5).look(71).look(90)
    assert watch.plateaus() == {}
    assert watch.look(70.5).plateaus() == {"0": 70.5}
    assert watch.look(80, times=10).plateaus() == {"0": 70.5}


def test_the_warm_up_waits_for_twenty_requests_however_long_they_take() -> None:
    watch = Watch().serve(requests=19).look(70, times=100)
    assert watch.plateaus() == {}
    assert watch.serve(requests=1).look(72, times=5).plateaus() == {"0": 72}


def test_an_engine_that_tells_no_ends_is_warm_by_its_first_tokens() -> None:
    watch = Watch("deepinfer")
    watch.store.observe(catalog.FIRST_TOKEN, ("m",), 0.1, 20, origin="log")
    watch.life.begin(1.0)
    watch.serve(requests=0).look(70, times=10)
    assert watch.plateaus() == {}, "they came before it started"
    watch.store.observe(catalog.FIRST_TOKEN, ("m",), 0.1, 20, origin="log")
    assert watch.look(70, times=5).plateaus() == {"0": 70}


def test_an_interval_that_does_not_divide_a_minute_makes_nothing_shorter() -> None:
    watch = Watch(interval=45.0).serve().look(99, times=2).look(70, times=6)
    assert watch.plateaus() == {}
    assert watch.look(70).plateaus() == {"0": 70}


def test_loading_and_a_planned_stop_are_no_rest() -> None:
    watch = Watch().serve()
    watch.life.enter("loading")
    watch.look(30, times=10)
    watch.serve().look(99).look(70, times=4)
    watch.life.enter("stopping")
    assert watch.look(10, times=10).plateaus() == {}


@pytest.mark.parametrize("how", ["the log says so", "the page is another process's", "it answers again"])
def test_a_restart_of_the_engine_forgets_the_plateau(how: str) -> None:
    watch = Watch().serve().look(70, times=6)
    assert watch.plateaus() == {"0": 70}
    if how == "the log says so":
        watch.life.begin(1.0)
    elif how == "it answers again":
        watch.life.silent(refused=True)
    restarted = how == "the page is another process's"
    watch.life.answered(healthy=True, moved=True, started_at=None, restarted=restarted)
    assert watch.plateaus() == {}, "not even until the next look"
    assert watch.look(75, times=10).plateaus() == {}, "its own twenty requests have not come yet"
    assert watch.serve().look(75, times=5).plateaus() == {"0": 75}


def test_beside_an_engine_that_serves_already_the_minutes_that_are_seen_count() -> None:
    """It is warm for long, but nothing says so: counts begin when the sidecar does."""
    watch = Watch()
    watch.life.answered(healthy=True, moved=False, started_at=1.0)
    assert watch.look(70, times=100).plateaus() == {}
    assert watch.serve().look(71, times=5).look(80).plateaus() == {"0": 71}


def test_each_gpu_has_five_minutes_of_its_own() -> None:
    watch = Watch().serve().look(50).look(70, times=3)
    for _ in range(10):
        watch.gpus(None, 60)
        watch.headroom.look()
    assert watch.plateaus() == {"1": 60}
    watch.look(72, 66, times=2)
    assert watch.plateaus() == {"0": 70, "1": 60}


async def test_the_sidecar_looks_by_itself() -> None:
    sidecar, stop = Sidecar(Config(gpus=GpuConfig(devices="none"))), asyncio.Event()
    sidecar.headroom.look = stop.set
    await asyncio.wait_for(sidecar.watch(stop), 10)


# whether the engine takes its memory when it starts


@pytest.mark.parametrize(
    ("engine", "told", "expected"),
    [
        ("vllm", [], 1.0),
        ("llamacpp", [], 1.0),
        ("generic", [], None),
        ("generic", [gauge(catalog.ENGINE_LIMIT, 0.9, "gpu_memory_utilization")], 1.0),
        ("generic", [gauge(catalog.ENGINE_LIMIT, 64.0, "max_running_requests")], None),
        ("triton", kv(pool=40), 1.0),
        ("dynamo", [], None),
    ],
)
def test_pre_allocation_is_told_by_the_profile_else_by_the_engine(engine, told, expected) -> None:
    known = Watch(engine).tell(*told).gauges
    assert known.get(catalog.ENGINE_PREALLOCATES, {}).get(()) == expected


def test_an_engine_of_ones_own_may_take_memory_as_it_needs_it() -> None:
    own = Profile("own", preallocates=False)
    told = gauge(catalog.ENGINE_LIMIT, 0.9, "gpu_memory_utilization")
    assert Watch(profile=own).tell(told).gauges[catalog.ENGINE_PREALLOCATES] == {(): 0.0}


def test_before_the_engine_is_recognised_nothing_is_said() -> None:
    sidecar = Sidecar(Config(gpus=GpuConfig(devices="none")))
    assert list(sidecar.headroom.samples({})) == []
