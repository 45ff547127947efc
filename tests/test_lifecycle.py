"""Phases of an engine's life, and what makes two runs comparable."""

import pytest

from exporter import catalog
from exporter.lifecycle import Lifecycle


def answered(life: Lifecycle, *, healthy: bool | None = None, moved: bool = False) -> None:
    life.answered(healthy=healthy, moved=moved, started_at=None)


def test_loading_for_ten_minutes_is_no_death() -> None:
    life = Lifecycle(has_page=True)
    for _ in range(600):
        life.silent(refused=True)
    assert (life.phase, life.up) == ("starting", False)
    answered(life)
    assert (life.phase, life.up) == ("serving", True)


def test_gone_without_a_word_is_dead_and_comes_back() -> None:
    life = Lifecycle(has_page=True)
    answered(life)
    life.silent(refused=True)
    assert (life.phase, life.up) == ("dead", False)
    life.begin(1.0)
    life.enter("loading")
    life.silent(refused=True)
    assert life.phase == "loading"
    answered(life)
    assert (life.phase, life.up) == ("serving", True)


def test_a_late_answer_is_down_but_not_dead() -> None:
    life = Lifecycle(has_page=True)
    answered(life)
    life.silent(refused=False)
    assert (life.phase, life.up) == ("serving", False)


def test_a_planned_stop_stays_one_while_requests_drain_and_when_the_server_is_gone() -> None:
    life = Lifecycle(has_page=True)
    answered(life)
    life.enter("stopping")
    answered(life, moved=True)
    assert (life.phase, life.up) == ("stopping", True)
    life.silent(refused=True)
    assert (life.phase, life.up) == ("stopping", False)
    answered(life)
    assert (life.phase, life.up) == ("serving", True)


def test_an_engine_that_died_behind_a_server_that_answers_is_down() -> None:
    life = Lifecycle(has_page=True)
    answered(life)
    answered(life, healthy=False)
    assert (life.phase, life.up) == ("dead", False)
    life.enter("dead")
    answered(life)
    assert (life.phase, life.up) == ("dead", False)


def test_a_death_the_log_told_wrongly_is_corrected_by_proof_of_life() -> None:
    life = Lifecycle(has_page=True)
    answered(life)
    life.enter("dead")
    before = life.lives
    answered(life, moved=True)
    assert (life.phase, life.up, life.lives) == ("serving", True, before + 1)


def test_a_server_without_a_page_is_up_once_it_works() -> None:
    life = Lifecycle(has_page=False)
    assert not life.up
    life.worked()
    assert life.up


def test_a_server_without_a_page_lives_again_after_more_work_than_was_under_way() -> None:
    life = Lifecycle(has_page=False)
    life.worked()
    life.enter("dead")
    for _ in range(19):
        life.worked()
    life.worked(finished=False)
    assert (life.phase, life.up) == ("dead", False)
    life.worked()
    assert (life.phase, life.up) == ("serving", True)


def test_a_phase_after_death_is_another_life() -> None:
    life = Lifecycle(has_page=True)
    life.enter("dead")
    before = life.lives
    life.enter("stopping")
    assert life.lives == before
    life.enter("dead")
    life.enter("loading")
    assert life.lives == before + 1


def test_a_phase_that_does_not_exist_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no phase"):
        Lifecycle(has_page=True).enter("sleeping")


def config_of(life: Lifecycle, gauges=None) -> str:
    samples = life.samples(gauges or {})
    return next(s.labels[3] for s in samples if s.family is catalog.ENGINE_INFO)


def test_the_same_parts_give_the_same_config_and_each_part_matters() -> None:
    def engine(**info: str) -> Lifecycle:
        life = Lifecycle(has_page=True)
        life.engine = "vllm"
        life.info |= {"model": "hy3", "version": "0.32.0"} | info
        return life

    tp8 = {catalog.PARALLELISM: {("tensor",): 8.0}}
    configs = [
        config_of(engine()),
        config_of(engine(dtype="bfloat16")),
        config_of(engine(model="other")),
        config_of(engine(), tp8),
        config_of(engine(), {catalog.PARALLELISM: {("tensor",): 4.0}}),
        config_of(engine(), {catalog.ENGINE_LIMIT: {("max_running_requests",): 8.0}}),
        config_of(engine(), {catalog.GPU_INFO: {("0", "GPU-1", "H100", "550", ""): 1.0}}),
    ]
    assert len(set(configs)) == len(configs)
    assert config_of(engine(), tp8) == config_of(engine(), tp8)


def test_a_part_that_cannot_be_read_for_a_while_does_not_make_another_config() -> None:
    life = Lifecycle(has_page=True)
    life.engine = "vllm"
    gpu = {catalog.GPU_INFO: {("0", "GPU-1", "H100", "550", ""): 1.0}}
    assert config_of(life, gpu) == config_of(life, {})
    life.begin(None)
    assert config_of(life, {}) != config_of(life, gpu)


def test_an_unknown_engine_has_no_info() -> None:
    assert catalog.ENGINE_INFO not in {s.family for s in Lifecycle(has_page=True).samples({})}
