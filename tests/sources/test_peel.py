"""Peeling: container prefix, colours, process prefix and JSON, in that order, and never an exception."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exporter.engines import profile as profiles
from exporter.sources.peel import BELOW, ERROR, WARNING, Peeler, Shape, Unwrapper, peel, seconds_of

SHAPES = [Shape(regex) for regex in profiles.bundled("vllm").log.records]
GENERIC = [Shape(regex) for regex in profiles.bundled("generic").log.records]


@pytest.mark.parametrize(
    ("line", "level", "process", "text"),
    [
        (b"INFO 03-02 10:00:01 [core.py:7] boom", BELOW, "", "boom"),
        (b"(EngineCore_DP0 pid=9) ERROR 03-02 10:00:01 [core.py:7] boom", ERROR, "EngineCore_DP0 pid=9", "boom"),
        (b'(Worker_TP1 pid=412) {"levelname":"ERROR","message":"boom"}', ERROR, "Worker_TP1 pid=412", "boom"),
        (b'{"level":"warning","msg":"\\u001b[31mboom\\u001b[0m"}', WARNING, "", "boom"),
        (b'{"log":{"level":"error"},"message":"boom"}', ERROR, "", "boom"),
        (b'{"level":"ERROR","fields":{"message":"boom"}}', ERROR, "", "boom"),
        (b"INFO:     Shutting down", BELOW, "", "Shutting down"),
        (
            b"(VllmWorker rank=1 pid=25) ERROR 08-18 06:39:05 [m.py:527] boom",
            ERROR,
            "VllmWorker rank=1 pid=25",
            "boom",
        ),
        (
            b"(EngineCore_0 pid=5) (RayWorkerWrapper pid=7, ip=10.0.0.8) ERROR 08-07 04:48:56 [w.py:6] boom",
            ERROR,
            "RayWorkerWrapper pid=7 EngineCore_0 pid=5",
            "boom",
        ),
        (b"(a pid=1) (b pid=2) (c pid=3) (d pid=4) boom", "", "c pid=3 b pid=2 a pid=1", "(d pid=4) boom"),
        (b"[rank0]: torch.OutOfMemoryError: boom", "", "rank0", "torch.OutOfMemoryError: boom"),
        (b"[rank 0] boom", "", "", "[rank 0] boom"),
        (b"step took 123ms", "", "", "step took 123ms"),
        (b"ERROR in the text, but no shape", "", "", "ERROR in the text, but no shape"),
        (b"loading: 10%\rloading: 100%", "", "", "loading: 100%"),
        (b"INFO 03-02 10:00:01 [core.py:7] boom\r", BELOW, "", "boom"),
        (
            b"INFO 03-02 10:00:01 [core.py:7] hi\rERROR 03-02 10:00:01 [core.py:7] boom",
            BELOW,
            "",
            "hi\rERROR 03-02 10:00:01 [core.py:7] boom",
        ),
        (b'{"not": "finished', "", "", '{"not": "finished'),
        (b"[1, 2]", "", "", "[1, 2]"),
    ],
)
def test_level_and_text_come_from_where_they_stand(line: bytes, level: str, process: str, text: str) -> None:
    record = peel(line, SHAPES)
    assert (record.level, record.process, record.text) == (level, process, text)


@pytest.mark.parametrize(
    "line",
    [
        b"2026-11-30 10:00:00 ERROR boom",
        b"2026-11-30T10:00:00.123Z [error] boom",
        b"2026-11-30 10:00:00,123 - ERROR - boom",
        b"[2026-11-30 10:00:00] ERROR: boom",
        b"ERROR 11-30 10:00:00 [core.py:7] boom",
        b"ERROR: boom",
        b"level=error boom",
        b"ts=2026-11-30T10:00:00Z level=error msg=boom",
        b"E1130 10:00:00.000000    4242 watch.go:8] boom",
        b"10:00:00.123 ERROR boom",
    ],
)
def test_usual_shapes_of_a_record_are_known_without_a_profile(line: bytes) -> None:
    record = peel(line, GENERIC)
    assert (record.level, record.text) == (ERROR, "boom")


def test_container_prefixes_are_taken_off_and_parts_joined_by_stream() -> None:
    data = (
        b"2026-01-01T00:00:00.1Z stderr P ERROR 03-02 10:00:01 [core.py:7] CUDA out of\n"
        b"2026-01-01T00:00:00.1Z stdout F INFO 03-02 10:00:01 [core.py:7] fine\n"
        b"2026-01-01T00:00:00.1Z stderr F  memory\n"
    )
    expected = b"INFO 03-02 10:00:01 [core.py:7] fine\nERROR 03-02 10:00:01 [core.py:7] CUDA out of memory\n"
    assert Unwrapper().feed(data) == expected
    split = Unwrapper()
    lines = data.splitlines(keepends=True)
    assert b"".join(split.feed(line) for line in lines) == expected


def test_container_prefixes_are_known_from_the_first_whole_one() -> None:
    unwrapper = Unwrapper()
    assert unwrapper.feed(b"cut amid a lin\n") == b"cut amid a lin\n"
    assert unwrapper.feed(b"1Z stderr F e\n2026-01-01T00:00:00.1Z stderr F ERROR boom\n") == b"e\nERROR boom\n"
    assert unwrapper.feed(b"2026-01-01T00:00:00.1Z stdout F next\n") == b"next\n"


def test_a_carriage_return_in_a_part_ends_no_line() -> None:
    stamp = b"2026-01-01T00:00:00.1Z stderr "
    data = stamp + b"P loading: 10%\rloading: 50%\r\n" + stamp + b"F loading: 100%\n"
    assert Unwrapper().feed(data) == b"loading: 10%\rloading: 50%\rloading: 100%\n"


def test_docker_s_lines_are_taken_out_of_their_objects_and_parts_joined_by_stream() -> None:
    data = (
        b'{"log":"ERROR 03-02 10:00:01 [core.py:7] \\u001b[31mCUDA out of ","stream":"stderr","time":"t"}\n'
        b'{"log":"INFO 03-02 10:00:01 [core.py:7] fine\\r\\n","stream":"stdout","time":"t"}\n'
        b'{"log":"mem\xc3\xb6ry\\u001b[0m\\n","stream":"stderr","attrs":{"tag":"x"},"time":"t"}\n'
        b'{"log":"torn by a full di\n'
        b'{"log":"{\\"level\\":\\"error\\"}\\n","stream":"stdout","time":"t"}\n'
    )
    expected = (
        b"INFO 03-02 10:00:01 [core.py:7] fine\r\nERROR 03-02 10:00:01 [core.py:7] CUDA out of mem\xc3\xb6ry\n"
        b'{"log":"torn by a full di\n{"level":"error"}\n'
    )
    assert Unwrapper().feed(data) == expected
    split = Unwrapper()
    assert b"".join(split.feed(line) for line in data.splitlines(keepends=True)) == expected


def test_a_server_s_own_objects_are_not_docker_s() -> None:
    data = b'{"log":"fine","level":"info"}\n'
    assert Unwrapper().feed(data) == data


@pytest.mark.parametrize("part", [b"2026-01-01T00:00:00Z stdout P %b\n", b'{"log":"%b","stream":"stdout"}\n'])
def test_parts_that_never_end_are_bounded(part: bytes) -> None:
    unwrapper = Unwrapper()
    for _ in range(100):
        unwrapper.feed(part % (b"x" * 16_000))
    assert sum(map(len, unwrapper._parts.values())) <= 64 << 10


def test_colours_go_and_what_only_looks_like_them_stays() -> None:
    data = b"\x1b[1;31mERROR \x1b[0m03-02 10:00:01 step took 123ms \x1b]0;title\x07done\n"
    assert Unwrapper().feed(data) == b"ERROR 03-02 10:00:01 step took 123ms done\n"


@given(st.binary(max_size=300))
def test_any_bytes_are_a_record(line: bytes) -> None:
    Unwrapper().feed(line + b"\n")
    record = peel(line.replace(b"\n", b""), SHAPES)
    assert isinstance(record.text, str)


STARTS = [
    "(APIServer pid=914) ",
    "(Worker_TP1 pid=7) (RayWorkerWrapper pid=8, ip=10.0.0.8) ",
    "(a pid=1) (b pid=2) (c pid=3) (d pid=4) ",
    "[rank0]: ",
    "",
]
LEVELS_OF_LINES = ["INFO ", "ERROR ", "INFO:     ", "INFO  ", "[INFO ", '{"level":"error"} ', ""]
TIMES_OF_LINES = [
    "11-30 07:26:42 ",
    "11-30 07:26:43 ",
    "11-3x 07:26:43 ",
    "2026-11-30 07:26:42.125 ",
    "11-30 07:26:4\u0663 ",
    "1796018235 ",
    "",
]
PLACES = [
    "[core.py:7] ",
    "[core.py:7]",
    "core.py:71] ",
    "[a b:7] ",
    "[x]y:7] ",
    "[x] [y:7] ",
    "E0101 ",
    "[TensorRT-LLM][ERROR] ",
    "",
]
REST = [
    "boom",
    " boom",
    "] boom",
    "[y:7] boom",
    "\ufffdboom\u00e9",
    "boom\rbang",
    "\r",
    "ERROR 11-30 07:26:42 [core.py:7] boom",
    "",
]


@settings(max_examples=300, deadline=None)
@example("vllm", "INFO ", ["11-30 07:26:42 [core.py:7]boom", "11-30 07:26:42 [core.py:7] boom"])
@example("vllm", "INFO ", ["11-30 07:26:42 [core.py:7] boom", "11-3x 07:26:42 [core.py:7] boom"])
@example("vllm", "INFO ", ["11-30 07:26:42 [core.py:7] boom", "11-30 07:26:43 [core.py:7] boom"])
@given(
    st.sampled_from(profiles.names()),
    st.tuples(st.sampled_from(STARTS), st.sampled_from(LEVELS_OF_LINES)).map("".join),
    st.lists(st.tuples(*map(st.sampled_from, (TIMES_OF_LINES, PLACES, REST))).map("".join), min_size=2, max_size=12),
)
def test_a_start_that_is_remembered_is_what_reading_it_anew_would_give(
    engine: str, start: str, rest: list[str]
) -> None:
    lines = [start + text for text in rest]
    shapes = [Shape(regex) for regex in profiles.bundled(engine).log.records]
    peeler, data, begin = Peeler(shapes), "".join(line + "\n" for line in lines).encode(), 0
    for line in lines:
        end = begin + len(line.encode())
        assert peeler.peel(data, begin, end) == peel(line.encode(), shapes)
        begin = end + 1


@pytest.mark.parametrize(
    ("pattern", "closed"),
    [
        (r"(?P<level>\w+) \[?(?P<place>[^\]\s]+:\d+)\] ?", True),
        (r"\[(?P<level>\w{4,5})\] ", True),
        (r"\[(?P<place>.+)\] ", False),
        (r"\[(?P<place>[^\s]+)\] ", False),
        (r"\[(?P<place>\S+)\] ", False),
        (r"(?P<time>20\d\d) \[(?P<place>\w+)\] ", False),
        (r"(?P<level>INFO)(?=:):\] ", False),
        (r"(?P<level>INFO): ", False),
    ],
)
def test_only_a_shape_that_cannot_go_on_is_remembered(pattern: str, closed: bool) -> None:
    assert Shape(re.compile(pattern)).closed is closed


@given(st.dictionaries(st.text(), st.recursive(st.integers() | st.text(), st.lists), max_size=4))
def test_any_json_object_is_a_record(value: dict) -> None:
    import json

    record = peel(json.dumps(value).encode(), SHAPES)
    assert record.shaped


def test_deep_json_is_no_trouble() -> None:
    assert peel(b'{"a":' * 5000 + b"1" + b"}" * 5000, SHAPES).text.startswith("{")


@pytest.mark.parametrize(
    ("earlier", "later", "apart"),
    [
        ("11-30 06:03:47", "11-30 06:03:48", 1.0),
        ("2026-11-30 06:03:47", "2026-11-30 06:04:47", 60.0),
        ("2026-11-30T06:03:47.5Z", "2026-11-30T06:03:48Z", 0.5),
        ("2026/11/30 06:03:47,500", "2026/11/30 06:03:48,000", 0.5),
        ("1796018235.5", "1796018236.0", 0.5),
        ("1796018235500", "1796018236000", 0.5),
        ("02-29 06:03:47", "02-29 06:03:48", 1.0),
        ("1130 06:03:47.000000", "1130 06:03:48.500000", 1.5),
        ("06:03:47.250", "06:03:48.000", 0.75),
        ("06:03:47", "06:03:48", 1.0),
    ],
)
def test_times_of_a_log_can_be_told_apart(earlier: str, later: str, apart: float) -> None:
    first, second = seconds_of(earlier), seconds_of(later)
    assert first is not None
    assert second is not None
    assert second - first == pytest.approx(apart)


def test_a_time_that_cannot_be_read_is_none() -> None:
    assert seconds_of("0.12.664.657") is None
    assert seconds_of("nonsense") is None


def test_the_shapes_of_records_do_not_backtrack_badly() -> None:
    hostile = ("2026-11-30 10:00:00" + " -|:" * 20_000).encode()
    assert peel(hostile, GENERIC).shaped


def test_a_line_of_docker_that_cannot_be_read_stays_as_it_is() -> None:
    unwrapper = Unwrapper()
    good = b'{"log":"INFO fine\\n","stream":"stdout","time":"2026-11-30T10:00:00Z"}\n'
    deep = b'{"log":"x\\n","stream":"stdout","attrs":' + b"[" * 100_000 + b"\n"
    assert unwrapper.feed(good + deep) == b"INFO fine\n" + deep
