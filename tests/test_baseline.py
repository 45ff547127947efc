"""Pinned baselines: where they come from, what they hold for, and what is wrong with them."""

from pathlib import Path

import pytest

from exporter import baseline, catalog, config
from exporter.baseline import Pin
from exporter.lifecycle import Lifecycle
from exporter.sidecar import Sidecar
from exporter.strictyaml import ConfigError

FILE = "pins:\n- {signal: request, quantile: 0.99, seconds: 420ms}\n- {signal: step, quantile: 0.99, seconds: 30ms}\n"


def told(*pins: Pin, model: str = "") -> dict[tuple[str, ...], float]:
    engine = Lifecycle(has_page=True)
    engine.engine = "vllm"
    engine.tell("model", "hy3")
    return {s.labels: s.value for s in baseline.samples(pins, engine, {}, model)}


def config_of() -> str:
    engine = Lifecycle(has_page=True)
    engine.engine = "vllm"
    engine.tell("model", "hy3")
    return engine.config({})


def test_a_pin_holds_for_the_model_that_is_served() -> None:
    assert told(Pin("request", 0.99, 0.42)) == {("hy3", "request", "0.99"): 0.42}
    assert told(Pin("request", 0.99, 0.42), model="mine") == {("mine", "request", "0.99"): 0.42}
    assert told(Pin("request", 0.5, 0.1, model="other")) == {("other", "request", "0.5"): 0.1}


def test_a_pin_of_another_config_does_not_hold() -> None:
    assert told(Pin("request", 0.99, 0.42, config="00000000")) == {}
    assert told(Pin("request", 0.99, 0.42, config=config_of())) == {("hy3", "request", "0.99"): 0.42}


def test_the_first_of_two_that_hold_is_taken() -> None:
    assert told(Pin("step", 0.99, 0.03), Pin("step", 0.99, 0.05, config=config_of())) == {("hy3", "step", "0.99"): 0.03}


def test_pins_of_the_settings_stand_above_those_of_files(tmp_path: Path) -> None:
    (tmp_path / "ramp.yaml").write_text(FILE)
    path = tmp_path / "stopline.yaml"
    path.write_text(
        "baseline:\n  files: [ramp.yaml]\n  pins:\n  - {signal: request, quantile: 0.99, seconds: 1s, model: hy3}\n"
    )
    pins = config.load(path).pins()
    assert [pin.seconds for pin in pins] == [1.0, 0.42, 0.03]
    assert told(*pins) == {("hy3", "request", "0.99"): 1.0, ("hy3", "step", "0.99"): 0.03}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pins: []\nlevel: 1\n", "{}:2: level: unknown key"),
        ("", "{}:1: pins: is required"),
        ("pins:\n- {signal: latency, quantile: 0.99, seconds: 1s}\n", "{}:2: pins[0].signal: expected one of request"),
        ("pins:\n- {signal: request, quantile: 99, seconds: 1s}\n", "{}:2: pins[0].quantile: must be above 0"),
        ("pins:\n- {signal: request, quantile: 0.99, seconds: 0s}\n", "{}:2: pins[0].seconds: must be above 0"),
        ("pins:\n- {signal: request, quantile: 0.99, seconds: 1}\n", "{}:2: pins[0].seconds: expected a duration"),
        (
            FILE + "- {signal: step, quantile: 0.990, seconds: 1s}\n",
            "{}:1: pins[2] pins quantile 0.99 of step a second",
        ),
    ],
    ids=["unknown", "empty", "signal", "quantile", "zero", "unit", "twice"],
)
def test_a_wrong_file_is_told_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "baseline.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        config.load(None, {"baseline": {"files": (path,)}})
    assert problem.format(path) in str(error.value)


def test_a_missing_file_is_told() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/pins\.yaml: no such file"):
        config.load(None, {"baseline": {"files": (Path("/nowhere/pins.yaml"),)}})


def test_a_changed_file_is_taken_and_a_broken_one_leaves_what_was(tmp_path: Path) -> None:
    path = tmp_path / "baseline.yaml"
    path.write_text(FILE)
    overrides = {"baseline": {"files": (path,)}}
    sidecar = Sidecar(config.load(None, overrides), overrides=overrides)

    def pinned() -> float | None:
        return sidecar.registry.get_sample_value(
            catalog.BASELINE.name, {"model": "", "signal": "request", "quantile": "0.99"}
        )

    assert pinned() == 0.42
    path.write_text(FILE.replace("420ms", "2s"))
    sidecar.reload()
    assert pinned() == 2.0
    path.write_text("pins: 7\n")
    sidecar.reload()
    assert pinned() == 2.0
    assert sidecar.registry.get_sample_value(catalog.RELOAD_OK.name) == 0.0
