"""The result file."""

import json
import math
from pathlib import Path

import pytest
from measured import CLIENT, engine, level

from exporter.load import result
from exporter.load.result import VERSION, File, Run, Tripped, Verdict
from exporter.strictyaml import ConfigError


def run() -> Run:
    levels = [
        level(1, [1.0] * 60, engine=engine(), client=CLIENT),
        level(2, [1.0] * 50 + [math.inf] * 10, engine=engine(errors={"cuda": 1.0})),
    ]
    tripped = Tripped("errors", 2, "10 timeout")
    return Run({"model": "hy3", "stream": True}, levels, 1, {"latency_ratio": 2.0}, Verdict("text", 1, tripped))


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    file = File(VERSION, [run()], ["batch"])
    result.write(path, file)
    assert result.read(path.read_bytes(), "result.json") == file
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_infinity_is_a_text_for_json_has_none(tmp_path: Path) -> None:
    document = json.loads(result.encode(File(VERSION, [run()])))
    assert document["runs"][0]["levels"][1]["latency"]["p99"] == "inf"
    assert document["runs"][0]["levels"][1]["latencies"][-1] == "inf"
    assert document["runs"][0]["levels"][0]["latency"]["p99_high"] == "inf"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"{", "x.json: not a result of stopline ramp: Input data was truncated"),
        (
            b'{"runs": []}',
            "x.json: not a result of stopline ramp: Object missing required field `stopline_result`",
        ),
        (b'{"stopline_result": 9, "runs": []}', "x.json: is of version 9, this stopline reads version 1"),
        (
            b'{"stopline_result": 1, "runs": [{"conditions": {}, "levels": 5}]}',
            "x.json: not a result of stopline ramp: Expected `array`, got `int` - at `$.runs[0].levels`",
        ),
    ],
)
def test_what_is_no_result(data: bytes, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        result.read(data, "x.json")
    assert error.value.problems == (problem,)


def test_a_directory_that_may_not_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        result.write(tmp_path / "no" / "result.json", File(VERSION, []))
