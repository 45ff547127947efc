"""The live page's HTML: what it shows of a state, that it never looks calm unknowing, and that nothing gets out."""

import re
from dataclasses import replace

import msgspec
import pytest
from outline import Outline
from states import HOSTILE, errors, incident, quiet

from exporter import catalog
from exporter.judge import Verdict
from exporter.live import page
from exporter.live.markup import Html, join, tag
from exporter.live.state import State


@pytest.mark.parametrize("state", [quiet, incident], ids=lambda state: state.__name__)
def test_the_page_of_a_state_is_this(state, golden) -> None:
    html = page.render(state())
    assert html.count(page._CSS) == html.count(page._JS) == 1
    html = html.replace(page._CSS, "/* page.css */").replace(page._JS, "// page.js")
    golden(
        f"page-{state.__name__}.html",
        re.sub(r"(?=<(?:h[123]|p|li|rect|path|text|dt|div|section|article)\b)", "\n", html),
    )


@pytest.mark.parametrize("state", [quiet, incident], ids=lambda state: state.__name__)
def test_names_from_outside_are_text_and_nothing_else(state) -> None:
    outline = Outline(page.render(state()))
    assert [name for name, _ in outline.elements].count("script") == 1
    names = {attribute for _, attributes in outline.elements for attribute in attributes}
    assert not [name for name in names if name.startswith("on") or name in ("style", "src", "srcset")]
    assert outline.having("href") == ["data:,", "metrics", "api/state", "-/healthy", "-/ready"]
    assert (HOSTILE in outline.text) == (state is incident)


def test_what_a_dead_engine_left_free_is_no_room() -> None:
    room = Outline(page.sections(errors())["gpus"]).text
    assert "1.0\xa0GiB held while the engine is not up" in room
    assert "effective headroom" not in room


def test_each_section_of_the_json_is_what_the_page_holds() -> None:
    state = incident()
    told = msgspec.json.decode(page.answer(state, with_sections=True))
    html = page.render(state)
    assert all(section in html for section in told["sections"].values())
    assert set(told["sections"]) <= set(Outline(html).having("id"))
    assert told["title"] == "Stop line: latency – Stopline"


def test_the_json_is_the_state_and_keeps_its_shape() -> None:
    told = page.answer(incident(), with_sections=False)
    assert msgspec.json.decode(told, type=State) == incident()
    assert list(msgspec.json.decode(told)) == [
        *("version", "at", "engine", "lines", "gpus", "past", "capacity", "sources", "pinned"),
    ]
    assert list(msgspec.json.decode(told)["lines"][0]) == [
        *("line", "state", "says", "unit", "value", "threshold", "warning", "baseline", "baseline_source", "model"),
        *("gpu", "cause", "reasons", "alert", "remedy"),
    ]


@pytest.mark.parametrize(
    ("states", "headline"),
    [
        (("ok", "ok", "ok"), "Calm: no stop line is near"),
        (("ok", "unknown", "ok"), "Cannot be judged: errors"),
        (("rising", "unknown", "ok"), "Rising: latency. Cannot be judged: errors"),
        (("tripped", "rising", "tripped"), "Stop line: latency and memory"),
        (("tripped", "unknown", "unknown"), "Stop line: latency. Cannot be judged: errors and memory"),
    ],
)
def test_the_headline_is_the_worst_and_never_calm_where_something_is_not_known(states, headline: str) -> None:
    lines = ("latency", "errors", "memory")
    verdicts = tuple(Verdict(line, state, "", "ratio") for line, state in zip(lines, states, strict=True))
    assert Outline(page.sections(replace(quiet(), lines=verdicts))["headline"]).text == headline


def test_every_picture_has_a_text_and_every_state_a_word() -> None:
    for state in (quiet(), incident()):
        outline = Outline(page.render(state))
        pictures = [attributes for name, attributes in outline.elements if name == "svg"]
        assert all(a.get("aria-label") if a.get("role") == "img" else a.get("aria-hidden") for a in pictures)
        for verdict in state.lines:
            assert page.words.STATES[verdict.state] in outline.text


def test_every_cause_has_words() -> None:
    """Those of the rules for latency, of the memory line's reasons, and every kind of error."""
    latency = {"queue", "step", "kv_cache", "communication", "request_mix"}
    memory = {"headroom", "used_ratio", "growth", "kv_cache"}
    errors = {*catalog.ERROR_KINDS, "phase_dead", "silent", "stalled", "ratio"}
    assert set(page.words.CAUSES) == latency | memory | errors


def test_markup_escapes_all_but_markup() -> None:
    assert tag("p", "<&>", tag("b", '"'), None, class_='"><i>', hidden=True, id=None, width=1.5) == (
        '<p class="&quot;&gt;&lt;i&gt;" hidden="" width="1.5">&lt;&amp;&gt;<b>&quot;</b></p>'
    )
    assert join("<", Html("<br>"), None) == "&lt;<br>"
