"""What an engine tells is the same whatever its version, its ranks and its collector make of names and lines."""

import re
from pathlib import Path

import pytest
from harness import Reader

from exporter.engines import profile as profiles
from exporter.engines.profile import Profile
from exporter.sources.fetch import Unreadable
from exporter.sources.scrape import ScrapeSource

FIXTURES = Path(__file__).parent / "fixtures"
IDLE = (FIXTURES / "vllm/0.32.0/metrics-idle.txt").read_text()
BUSY = (FIXTURES / "vllm/0.32.0/metrics-c8.txt").read_text()


class Answers:
    """An engine that answers each poll with the next of *pages*, at the path *at* or, if that is empty, at any."""

    url = "http://engine"

    def __init__(self, *pages: str, at: str) -> None:
        self._pages = iter(pages)
        self._at = at

    async def get(self, path: str) -> tuple[str, bool]:
        if "health" in path:
            return "", False
        if self._at not in ("", path):
            raise Unreadable("http_404", path)
        return next(self._pages), False


async def _told(profile: Profile | None, *pages: str, at: str = "") -> dict:
    """All that comes of *pages*, histograms bucket by bucket."""
    reader = Reader(profile or "generic")
    server = Answers(*pages, at=at)
    source = ScrapeSource(server, profile, reader.store, reader.lifecycle, tick=None, clock=reader.clock)
    for _ in pages:
        await source.once()
        reader.clock.pass_(1.0)
    assert all(reading.ok for reading in reader.store.readings.values())
    histograms = {
        (family.short, labels): (buckets.cumulative(), pytest.approx(buckets.sum))
        for family, series in reader.store.histograms.items()
        for labels, buckets in series.items()
    }
    return reader.told() | histograms


def _renamed(page: str, old: str, new: str) -> str:
    """*page* with every metric that starts with *old* under a name that starts with *new*."""
    return re.sub(rf"(?m)^((?:# (?:HELP|TYPE) )?){re.escape(old)}", rf"\g<1>{new}", page)


@pytest.mark.parametrize("start", ["ray_vllm_", "ray_vllm:", "kserve_vllm:", "kserve_vllm_", "vllm_"])
async def test_whoever_passes_vllms_page_on_may_put_a_prefix_before_its_names(start: str) -> None:
    passed_on = [_renamed(page, "vllm:", start) for page in (IDLE, BUSY)]
    assert await _told(None, *passed_on) == await _told(None, IDLE, BUSY)


async def test_labels_of_a_worker_neither_split_nor_double_anything() -> None:
    pages = [_renamed(page, "vllm:", "ray_vllm_") for page in (IDLE, BUSY)]
    labelled = [re.sub(r"(?m)^(ray_vllm_\w+)\{", r'\1{NodeAddress="10.0.0.4",WorkerId="0c1f",', page) for page in pages]
    assert await _told(None, *labelled) == await _told(None, IDLE, BUSY)


async def test_the_deprecated_gauge_beside_rays_counters_is_not_counted() -> None:
    pages = [_renamed(page, "vllm:", "ray_vllm_") for page in (IDLE, BUSY)]
    both = []
    for page in pages:
        counters = re.findall(r"(?m)^(?:# TYPE )?ray_vllm_\w+_total(?:\{.*| counter)$", page)
        assert counters
        twins = (line.replace("_total", "", 1).replace(" counter", " gauge") for line in counters)
        both.append(page + "".join(f"{twin}\n" for twin in twins))
    assert await _told(None, *both) == await _told(None, IDLE, BUSY)


async def test_the_page_of_vllm_within_nim_is_found_and_is_vllms() -> None:
    assert await _told(None, IDLE, BUSY, at="/v1/metrics") == await _told(None, IDLE, BUSY)


async def test_nim_has_its_page_at_either_path() -> None:
    pages = [(FIXTURES / f"nim/constructed/metrics-{name}.txt").read_text() for name in ("idle", "busy")]
    assert await _told(None, *pages, at="/metrics") == await _told(None, *pages, at="/v1/metrics")


@pytest.mark.parametrize(
    "pages",
    [
        ("vllm/0.32.0/metrics-idle.txt", "vllm/0.32.0/metrics-c8.txt"),
        ("sglang/0.5.23/metrics-idle.txt", "sglang/0.5.23/metrics-c8-after.txt"),
        ("trtllm/constructed/metrics-idle.txt", "trtllm/constructed/metrics-busy.txt"),
    ],
    ids=lambda pages: pages[0].partition("/")[0],
)
async def test_a_worker_of_dynamo_is_the_engine_whose_metrics_it_passes_on(pages: tuple[str, str]) -> None:
    own = "# TYPE dynamo_component_inflight_requests gauge\ndynamo_component_inflight_requests 3\n"
    plain = [(FIXTURES / page).read_text() for page in pages]
    added = 'dynamo_namespace="dynamo",dynamo_component="backend",'
    passed_on = [own + re.sub(r"(?m)^([:\w]+)\{", rf"\1{{{added}", page) for page in plain]
    assert await _told(None, *passed_on) == await _told(None, *plain)


async def test_ranks_that_tell_the_same_tell_it_once() -> None:
    """Tensor ranks 0 and 1 are data-parallel rank 0, 2 and 3 are rank 1."""
    pages = [(FIXTURES / f"sglang/constructed-ranks/metrics-{name}.txt").read_text() for name in ("idle", "busy")]
    alone = [re.sub(r'(?m)^.*tp_rank="[13]".*\n', "", page) for page in pages]
    assert alone != pages
    assert await _told(None, *pages) == await _told(None, *alone)


def _under(page: str, names: tuple[str, ...], wanted: tuple[str, ...]) -> str:
    """*page* with the metric that has one of *names*, the first that is there, under the *wanted* ones instead."""
    part = r"(?m)^(?:# (?:HELP|TYPE) )?{}(?:_bucket|_sum|_count|_created)?[{{ ].*\n"
    lines = {name: re.findall(part.format(re.escape(name)), page) for name in names}
    has = next((name for name in names if lines[name]), names[0])
    rest = re.sub(part.format(f"(?:{'|'.join(map(re.escape, names))})"), "", page)
    return rest + "".join(line.replace(has, name, 1) for name in wanted for line in lines[has])


def _renames() -> list:
    """Each metric that has had several names, with two pages that have it."""
    cases = []
    for profile in map(profiles.bundled, profiles.names()):
        for names in (rule.names for rules in profile.page_rules().values() for rule in rules if len(rule.names) > 1):
            for idle in sorted(FIXTURES.glob(f"{profile.engine}/*/metrics-idle.txt")):
                later = [page for page in sorted(idle.parent.glob("metrics-*.txt")) if page != idle]
                pages = idle.read_text(), later[-1].read_text()
                if any(f"\n{name}" in pages[-1] for name in names):
                    cases.append(
                        pytest.param(profile, names, pages, id=f"{idle.parts[-3]}-{idle.parts[-2]}-{names[0]}")
                    )
    return cases


@pytest.mark.parametrize(("profile", "names", "pages"), _renames())
async def test_a_metric_tells_the_same_under_its_old_name_its_new_one_and_both(profile, names, pages) -> None:
    told = await _told(profile, *pages)
    for wanted in (*((name,) for name in names), names):
        assert await _told(profile, *(_under(page, names, wanted) for page in pages)) == told


def test_every_engine_with_renamed_metrics_is_among_these() -> None:
    tried = {case.values[0].engine for case in _renames()}
    renamed = {
        profile.engine
        for profile in map(profiles.bundled, profiles.names())
        if any(len(rule.names) > 1 for rules in profile.page_rules().values() for rule in rules)
    }
    assert tried == renamed
