"""Pins for the sidecar, metrics for a collector, a picture."""

import math
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from measured import engine, level
from prometheus_client.parser import text_string_to_metric_families

from exporter import config, strictyaml
from exporter.baseline import Pin, Pins
from exporter.load import compare, picture, pin, textfile
from exporter.load.result import Run, Tripped, Verdict

IDENTITY = {"model": "hy3", "config": "abc12345"}


def run(**changes) -> Run:
    levels = [level(1, [0.4] * 60, engine=engine()), level(2, [0.5] * 60), level(4, [0.9] * 59 + [math.inf])]
    verdict = Verdict("text", 2, Tripped("errors", 4, "1 timeout"))
    limits = {"latency_seconds": 0.8}
    return Run({"model": "other"}, levels, 1, limits, verdict, **({"identity": IDENTITY} | changes))


def test_the_sidecar_reads_the_pins_of_a_ramp(tmp_path: Path) -> None:
    path = tmp_path / "baseline.yaml"
    assert pin.write(path, run()) == 11
    pins = strictyaml.load(path, Pins).pins
    assert {(p.signal, p.quantile): round(p.seconds, 6) for p in pins} == {
        ("request", 0.5): 0.4, ("request", 0.95): 0.4, ("request", 0.99): 0.4,
        ("time_to_first_token", 0.5): 0.1, ("time_to_first_token", 0.95): 0.1, ("time_to_first_token", 0.99): 0.1,
        ("queue_wait", 0.5): 0.0005, ("queue_wait", 0.95): 0.0009, ("queue_wait", 0.99): 0.001,
        ("step", 0.5): 0.02, ("step", 0.99): 0.024,
    }  # fmt: skip
    assert {(p.model, p.config) for p in pins} == {("hy3", "abc12345")}
    assert config.load(None, {"baseline": {"files": (path,)}}).pins() == pins


def test_without_a_sidecar_the_pins_hold_for_any_config(tmp_path: Path) -> None:
    plain = Run({"model": "other"}, [level(1, [0.4] * 60)], 1)
    pin.write(tmp_path / "b.yaml", plain)
    assert strictyaml.load(tmp_path / "b.yaml", Pins).pins[2] == Pin("request", 0.99, 0.4, "other", "")


def test_what_failed_is_no_baseline(tmp_path: Path) -> None:
    failed = Run({}, [level(1, [0.4] * 56 + [math.inf] * 4)], 1)
    assert [(p.signal, p.quantile) for p in pin.pins(failed)] == [("request", 0.5), ("time_to_first_token", 0.5)]
    assert pin.write(tmp_path / "b.yaml", Run({}, [])) == 0
    assert not (tmp_path / "b.yaml").exists()


def test_a_baseline_that_was_cut_short_is_none(tmp_path: Path) -> None:
    cut = Run({}, [level(1, [0.4] * 3, complete=False)], 1)
    assert pin.unfit(cut) == "the baseline, concurrency 1, was cut short after 3 requests"
    assert pin.write(tmp_path / "b.yaml", cut) == 0
    assert not (tmp_path / "b.yaml").exists()


@pytest.mark.parametrize("line", ["errors", "memory"])
def test_a_baseline_that_tripped_is_none(tmp_path: Path, line: str) -> None:
    path = tmp_path / "b.yaml"
    verdict = Verdict("text", None, Tripped(line, 1, "9 of\n60"))
    assert pin.write(path, msgspec.structs.replace(run(), verdict=verdict)) == 0
    assert not path.exists()


def test_the_verdict_as_metrics(tmp_path: Path, golden) -> None:
    path = tmp_path / "ramp.prom"
    textfile.write(path, run(), now=1_700_000_000.0)
    golden("ramp.prom", path.read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["ramp.prom"]
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=path.read_bytes(), capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_a_ramp_that_found_nothing_says_so_in_metrics(tmp_path: Path) -> None:
    path = tmp_path / "ramp.prom"
    textfile.write(path, Run({}, [], None, {}, Verdict("text", None, None, False)))
    told = {s.name: s.value for f in text_string_to_metric_families(path.read_text()) for s in f.samples}
    assert (told["stopline_ramp_concurrency_limit"], told["stopline_ramp_finished"]) == (0.0, 0.0)
    with pytest.raises(OSError, match="No such file or directory"):
        textfile.write(tmp_path / "no" / "ramp.prom", run())


def test_the_picture_of_a_ramp(golden) -> None:
    drawn = picture.of_ramp(run())
    ElementTree.fromstring(drawn)
    golden("ramp.svg", drawn)


def test_the_picture_of_a_comparison_escapes_its_names(golden) -> None:
    runs = [(str(n), Run({"batch <&>": n}, [level(2, [1.0 / n] * 60)])) for n in (1, 2, 4)]
    drawn = picture.of_comparison(compare.compare(runs, compare.Rules()))
    assert [e.text for e in ElementTree.fromstring(drawn).iter() if e.text == "batch <&>"] == ["batch <&>"] * 2
    golden("compare.svg", drawn)


def test_a_picture_of_nothing_says_so_and_draws_no_axis() -> None:
    drawn = ElementTree.fromstring(picture.of_ramp(Run({}, [])))
    assert [(e.tag.rpartition("}")[2], e.text) for e in drawn if e.get("class") or e.tag.endswith("text")] == [
        ("text", "P99 in seconds"),
        ("text", "nothing was measured"),
        ("text", "throughput in requests/s"),
        ("text", "nothing was measured"),
    ]
