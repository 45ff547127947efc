"""A page as numbers, and increases that never go backwards."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from exporter.engines import profile as profiles
from exporter.engines.profile import Profile
from exporter.sources.increases import Increases, histograms
from exporter.sources.page import NotAPage, PageReader, names_of

VLLM = profiles.bundled("vllm")
TOKENS = "vllm:prompt_tokens_total"
QUEUE = "vllm:request_queue_time_seconds"


def read(text: str):
    return PageReader(VLLM).read(text)


def tokens(value: float, *, name: str = TOKENS, start: float | None = None) -> str:
    text = f'{name}{{model_name="m"}} {value}\n'
    return text if start is None else f"process_start_time_seconds {start}\n" + text


def test_a_start_before_1970_is_none() -> None:
    assert read(tokens(1, start=-5.0)).started_at is None
    assert read(tokens(1, start=1000.0)).started_at == 1000.0


@pytest.mark.parametrize(
    "name",
    [
        "vllm:prompt_tokens_total",
        "vllm_prompt_tokens_total",
        "ray_vllm_prompt_tokens_total",
        "ray_vllm:prompt_tokens_total",
        "kserve_vllm:prompt_tokens_total",
    ],
)
def test_a_collectors_prefix_makes_no_difference(name: str) -> None:
    assert list(read(tokens(5, name=name)).samples[TOKENS].values()) == [5.0]
    assert profiles.of_page({name}) == "vllm"


def test_numbers_that_are_none_are_left_out_and_counted() -> None:
    page = read(tokens(5) + 'vllm:num_requests_running{a="1"} NaN\nvllm:num_requests_running{a="2"} +Inf\n')
    assert page.samples["vllm:num_requests_running"] == {}
    assert page.dropped == {"vllm:num_requests_running": 2}


def test_help_timestamps_and_labels_with_spaces_are_read_as_what_they_are() -> None:
    page = read(
        "# HELP vllm:num_requests_running as in vllm:num_requests_running 7\n"
        'vllm:num_requests_running{model_name="my model, v1 }"} 3 1700000000000\n'
    )
    ((key, value),) = page.samples["vllm:num_requests_running"].items()
    assert (key[1], value) == ((("model_name", "my model, v1 }"),), 3.0)


PAGES = sorted(p for p in (Path(__file__).parents[1] / "fixtures").rglob("metrics-*.txt"))


def alike_and_anew(first: str, second: str, profile: Profile = VLLM) -> None:
    """*second* is read the same after *first* as by a reader that has never seen a page."""
    seasoned = PageReader(profile)
    for _ in range(3):
        seasoned.read(first)
    assert seasoned.read(second) == PageReader(profile).read(second)
    assert seasoned.read(second) == PageReader(profile).read(second)


@pytest.mark.parametrize("path", PAGES, ids=[f"{p.parent.parent.name}/{p.parent.name}/{p.name}" for p in PAGES])
def test_a_page_that_comes_again_is_read_as_if_for_the_first_time(path: Path) -> None:
    text = path.read_text()
    profile = profiles.bundled(profiles.of_page(names_of(text)))
    more = re.sub(r"(?m)^(?!#)(.* )(\d+(?:\.\d+)?)$", lambda m: m[1] + str(float(m[2]) + 7), text)
    assert more != text
    alike_and_anew(text, more, profile)


LINES = st.one_of(
    st.builds(
        "{}{} {}{}".format,
        st.sampled_from([TOKENS, "vllm_num_requests_running", "vllm:num_requests_running", "up", f"{QUEUE}_sum"]),
        st.sampled_from(
            [
                "",
                "{}",
                '{model_name="m"}\t7',
                '{model_name="m"}8',
                '{model_name="a  b"}',
                '{model_name="m"}',
                '{model_name="a b",engine="0"}',
                '{model_name="x',
                "{engine=}",
            ]
        ),
        st.sampled_from(["0", "5", "7.5", "-1", "NaN", "+Inf", "1e400", "1_0", "x", "", " 5", "1099511627776"]),
        st.sampled_from(["", "", " ", "\r", " 1700000000000", " # {} 1", "\t3"]),
    ),
    st.sampled_from([f"# TYPE {TOKENS} counter", f"# TYPE {TOKENS} gauge", "# HELP up 5", "# EOF", "", "#", " ", "\t"]),
    st.text(max_size=20),
)


@settings(max_examples=300)
@given(
    st.lists(LINES, max_size=12), st.lists(st.sampled_from(["0", "8", "NaN", "2 5", "1_1", "", "up 3"]), max_size=12)
)
def test_whatever_changes_on_a_page_it_is_read_as_if_for_the_first_time(lines: list[str], values: list[str]) -> None:
    first = ["up 1", *lines]  # or it may be no page at all
    changed = [line.rpartition(" ")[0] + " " + v for line, v in zip(first, values, strict=False)]
    second = changed + first[len(changed) :]
    alike_and_anew("\n".join(first), "\n".join(["up 1", *second]))
    with suppress(NotAPage):
        alike_and_anew("\n".join(first), "\n".join(second))


def test_one_broken_family_costs_only_itself() -> None:
    page = read('vllm:num_requests_running{model_name="m} 3\n' + tokens(5))
    assert page.dropped == {"vllm:num_requests_running": 1}
    assert list(page.samples[TOKENS].values()) == [5.0]


@pytest.mark.parametrize("text", ["", "<html><body>hello</body></html>\n", "\n\n", '{"a": 1}'])
def test_what_is_no_page_is_refused(text: str) -> None:
    with pytest.raises(NotAPage):
        read(text)


def test_both_formats_of_the_same_metrics_read_the_same() -> None:
    registry = CollectorRegistry()
    Counter("vllm:prompt_tokens", "x", ["model_name"], registry=registry).labels("m").inc(5)
    Histogram(QUEUE, "x", ["model_name"], registry=registry).labels("m").observe(0.5)
    text = read(generate_latest(registry).decode())
    other = PageReader(VLLM).read(openmetrics(registry).decode(), openmetrics=True)
    assert {n: s for n, s in text.samples.items() if "created" not in n} == {
        n: s for n, s in other.samples.items() if "created" not in n
    }
    assert other.has(TOKENS)


def test_ranks_that_mirror_each_other_are_counted_once() -> None:
    sglang = PageReader(profiles.bundled("sglang"))
    text = "".join(f'sglang:num_queue_reqs{{model_name="m",tp_rank="{rank}"}} {3 + rank}\n' for rank in range(4))
    assert list(sglang.read(text).samples["sglang:num_queue_reqs"].values()) == [6.0]


def grow(pages: list[str]) -> list[float]:
    increases, out = Increases(), []
    for text in pages:
        page = read(text)
        increases.turn(page)
        out.append(sum(increases.of(key, value) for key, value in page.samples[TOKENS].items()))
        increases.end()
    return out


def test_the_first_page_only_sets_the_reference() -> None:
    assert grow([tokens(100), tokens(130)]) == [0, 30]


def test_a_series_that_appears_later_grew_from_nothing() -> None:
    assert grow(["vllm:num_requests_running 1\n", tokens(7)]) == [0, 7]


def test_a_fall_is_a_restart_and_the_new_value_the_increase() -> None:
    assert grow([tokens(100), tokens(130), tokens(20), tokens(25)]) == [0, 30, 20, 5]


def test_a_restart_that_overtook_the_old_value_is_known_by_the_start_time() -> None:
    assert grow([tokens(100, start=1), tokens(130, start=2)]) == [0, 130]


def test_without_a_start_time_one_series_that_falls_is_not_the_whole_engine() -> None:
    def ranks(*values: int) -> str:
        return "".join(f'{TOKENS}{{engine="{rank}",model_name="m"}} {n}\n' for rank, n in enumerate(values))

    assert grow([ranks(100, 100, 100), ranks(7, 110, 105)]) == [0, 7 + 10 + 5]


def test_a_start_time_told_anew_with_a_rounding_error_is_no_restart() -> None:
    assert grow([tokens(100, start=1000.01), tokens(130, start=1000.02)]) == [0, 30]


@pytest.mark.parametrize("nothing", ["NaN", "-1", "1e308"])
def test_a_series_that_was_there_without_a_number_has_no_known_increase(nothing: str) -> None:
    text = f'{TOKENS}{{model_name="m"}} {nothing}\n'
    assert grow([text, tokens(500), tokens(510)]) == [0, 0, 10]
    assert grow([tokens(400), text, tokens(510)]) == [0, 0, 110]


def test_a_page_that_churns_labels_costs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.sources.increases._MOST_REMEMBERED", 100)
    increases = Increases()
    for poll in range(50):
        page = read(tokens(poll) + "".join(f'{TOKENS}{{model_name="{poll}-{i}"}} 1\n' for i in range(10)))
        increases.turn(page)
        assert increases.of((TOKENS, (("model_name", "m"),)), poll) == (1 if poll else 0)
        increases.end()
        assert len(increases._last) <= 100 + 2 * 11


def histogram(counts: dict[str, float], total: float, start: float = 1.0) -> str:
    text = f"process_start_time_seconds {start}\n"
    text += "".join(f'{QUEUE}_bucket{{le="{le}",model_name="m"}} {n}\n' for le, n in counts.items())
    return text + f'{QUEUE}_sum{{model_name="m"}} {total}\n{QUEUE}_count{{model_name="m"}} {counts["+Inf"]}\n'


def windows(pages: list[str]) -> list[tuple[tuple[int, ...], float]]:
    increases, out = Increases(), []
    for text in pages:
        page = read(text)
        increases.turn(page)
        for _, group in histograms(page, QUEUE):
            window = increases.window(group)
            assert window is not None
            out.append((window.counts, window.sum))
        increases.end()
    return out


def test_windows_of_a_histogram() -> None:
    pages = [
        histogram({"0.3": 5, "1": 6, "+Inf": 6}, 2.0),
        histogram({"0.3": 7, "1": 9, "+Inf": 10}, 9.0),
        histogram({"0.3": 1, "1": 1, "+Inf": 1}, 0.1, start=2.0),
    ]
    assert windows(pages) == [((0, 0, 0), 0.0), ((2, 1, 1), 7.0), ((1, 0, 0), 0.1)]


def test_a_bucket_or_a_sum_that_falls_alone_shows_as_impossible() -> None:
    pages = [
        histogram({"0.3": 5, "+Inf": 6}, 2.0),
        histogram({"0.3": 4, "+Inf": 7}, 3.0),
        histogram({"0.3": 5, "+Inf": 8}, 1.0),
    ]
    assert windows(pages)[1:] == [((-1, 2), 1.0), ((1, 0), -2.0)]


@pytest.mark.parametrize("labels", ['le="soon"', 'model_name="m"'])
def test_a_bucket_without_a_bound_makes_no_window(labels: str) -> None:
    page = read(histogram({"0.3": 5, "+Inf": 6}, 2.0) + f"{QUEUE}_bucket{{{labels}}} 3\n")
    increases = Increases()
    increases.turn(page)
    assert None in [increases.window(group) for _, group in histograms(page, QUEUE)]


def test_a_histogram_without_buckets_is_one_bucket() -> None:
    pages = [f"{QUEUE}_sum 1\n{QUEUE}_count 1\n", f"{QUEUE}_sum 4\n{QUEUE}_count 3\n"]
    assert windows(pages) == [((0,), 0.0), ((2,), 3.0)]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.sampled_from('vllm:_promtkens{}="\\\n# 0123456789.eNaInf+-'), max_size=300))
def test_any_text_is_a_page_or_is_refused(text: str) -> None:
    try:
        read(text)
    except NotAPage:
        assert not names_of(text)


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=30))
def test_increases_add_up_to_all_that_happened_since_the_first_page(steps: list[tuple[int, bool]]) -> None:
    """Whatever restarts there are, as long as the start time tells of them."""
    value, start, happened, pages = 0, 1.0, 0, [tokens(0, start=1.0)]
    for amount, restart in steps:
        if restart:
            value, start = 0, start + 1
        value += amount
        happened += amount
        pages.append(tokens(value, start=start))
    assert sum(grow(pages)) == happened


def test_a_real_page_reads_the_same_in_both_formats() -> None:
    captured = Path(__file__).parent.parent / "fixtures/sglang/0.5.23"
    reader = PageReader(profiles.bundled("sglang"))
    text = reader.read((captured / "metrics-streams.txt").read_text())
    other = reader.read((captured / "streams.openmetrics").read_text(), openmetrics=True)
    for page in (text, other):
        del page.samples["sglang:http_responses_total"]  # counts the answers with these very pages
    assert (other.samples, other.dropped) == (text.samples, {})
    assert text.samples["sglang:e2e_request_latency_seconds_count"]


def test_what_is_no_page_is_none_however_often_it_comes() -> None:
    reader = PageReader(VLLM)
    for _ in range(3):
        with pytest.raises(NotAPage):
            reader.read("<html>\n 5\n")
