"""What the engine told at its start outlives a restart of the sidecar, and no restart of the engine."""

import os
from pathlib import Path

import pytest

from exporter import catalog
from exporter.engines.profile import bundled
from exporter.facts import Facts
from exporter.lifecycle import Lifecycle
from exporter.simulator import Engine, EngineConfig, Log
from exporter.sources.lines import Lines
from exporter.store import Store

NOW = 1_000_000.0


class Watcher:
    """A sidecar's life: what it knows of the engine, by one log."""

    def __init__(self, directory: Path | None, *, now: float = NOW) -> None:
        self.life = Lifecycle(has_page=True)
        self.life.engine = "vllm"
        self.store = Store(factor=2.0, cap=10, lag=0.25, clock=lambda: 0.0, wall=lambda: now)
        self.lines = Lines("engine.log", bundled("vllm"), self.store, self.life, clock=lambda: 0.0)
        self.facts = Facts(directory, self.life)
        self.facts.recall({"engine.log": self.lines}, now)

    def reads_start(self, **changes: object) -> None:
        written: list[str] = []
        Log(Engine(EngineConfig.hy3_h20(**changes)), written.append)
        self.lines.feed("".join(written).encode(), history=False)

    def answers(self, started_at: float | None, *, restarted: bool = False) -> None:
        self.life.answered(healthy=True, moved=False, started_at=started_at, restarted=restarted)

    def keeps(self) -> None:
        self.facts.keep({"engine.log": self.lines})

    @property
    def knows(self) -> tuple[str, dict[str, str], dict[tuple[str, ...], float]]:
        facts = {(family.name, *labels): value for (family, labels), value in self.lines.facts.items()}
        gauges = {
            family: {labels: value for (f, labels), value in self.lines.facts.items() if f is family}
            for family in (catalog.PARALLELISM, catalog.ENGINE_LIMIT)
        }
        return self.life.config(gauges), self.life.info, facts


@pytest.fixture
def known(tmp_path: Path) -> Watcher:
    """What it was when the sidecar was stopped."""
    first = Watcher(tmp_path)
    first.reads_start()
    first.answers(5000.0)
    first.keeps()
    os.utime(tmp_path / "engine.json", (NOW, NOW))
    return first


def test_a_restarted_sidecar_knows_the_engine_beside_a_log_that_was_cut(tmp_path: Path, known: Watcher) -> None:
    again = Watcher(tmp_path)
    again.answers(5000.0)
    assert again.knows == known.knows
    assert again.life.info["dtype"] == "bfloat16"
    assert ("stopline_parallelism", "tensor") in again.knows[2]
    assert again.life.started_at == 5000.0


def test_a_page_of_another_process_makes_it_void(tmp_path: Path, known: Watcher) -> None:
    again = Watcher(tmp_path)
    again.answers(6000.0)
    assert again.knows == (again.life.config({}), {"model": "hy3"}, {})
    assert again.life.config({}) != known.knows[0]


def test_a_log_that_tells_a_start_makes_it_void(tmp_path: Path, known: Watcher) -> None:
    again = Watcher(tmp_path)
    again.reads_start(tensor_parallel=4, kv_blocks=2100, weights_bytes=75_000_000_000)
    fresh = Watcher(None)
    fresh.reads_start(tensor_parallel=4, kv_blocks=2100, weights_bytes=75_000_000_000)
    again.answers(6000.0)
    assert again.knows == fresh.knows
    assert again.knows[0] != known.knows[0]


def test_a_restart_that_only_the_page_shows_makes_it_void_too(known: Watcher) -> None:
    known.answers(6000.0, restarted=True)
    assert known.knows[1:] == ({"model": "hy3"}, {})


def test_a_start_told_by_the_log_before_the_page_is_back_stands(known: Watcher) -> None:
    before = known.knows
    known.life.silent(refused=True)
    known.reads_start()
    known.answers(6000.0, restarted=True)
    assert known.knows == before


@pytest.mark.parametrize(("age", "believed"), [(3599.0, True), (3601.0, False)])
def test_without_a_start_time_it_is_believed_for_an_hour(tmp_path: Path, age: float, believed: bool) -> None:
    first = Watcher(tmp_path)
    first.reads_start()
    first.life.started_at = None
    first.keeps()
    os.utime(tmp_path / "engine.json", (NOW, NOW))
    assert bool(Watcher(tmp_path, now=NOW + age).life.info) is believed


@pytest.mark.parametrize("text", ["", "{", '{"started_at": 1, "info": [], "facts": {}}', "[" * 100_000])
def test_a_spoilt_file_is_told_and_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    (tmp_path / "engine.json").write_text(text)
    assert Watcher(tmp_path).life.info == {}
    assert "facts of the engine not recalled" in caplog.text


def test_only_what_this_version_has_and_what_can_be_a_label_is_taken(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(
        '{"started_at": 1.0, "info": {"model": "m", "dtype": "a\\nb"}, "facts": {"engine.log": ['
        '["stopline_parallelism", ["tensor"], 8], ["stopline_parallelism", ["tensor", "x"], 8],'
        '["stopline_parallelism", ["a\\nb"], 8], ["stopline_gone", [], 1], ["stopline_errors_total", ["cuda"], 1]'
        '], "other.log": [["stopline_parallelism", ["tensor"], 8]]}}'
    )
    watcher = Watcher(tmp_path)
    assert watcher.life.info == {"model": "m"}
    assert {(f.name, *labels): v for (f, labels), v in watcher.lines.facts.items()} == {
        ("stopline_parallelism", "tensor"): 8.0
    }


def test_what_has_not_changed_is_not_written_again_but_is_still_true(tmp_path: Path, known: Watcher) -> None:
    file = tmp_path / "engine.json"
    before = file.stat().st_ino
    known.keeps()
    assert file.stat().st_ino == before
    assert file.stat().st_mtime > NOW


def test_a_directory_that_cannot_be_written_loses_nothing_else(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path / "missing")
    watcher.reads_start()
    watcher.keeps()
    assert watcher.life.info["model"] == "hy3"
