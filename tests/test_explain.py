"""``stopline explain``: what each line or metric became, and a first mapping for an unknown log."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from exporter import config, draft, explain
from exporter.cli import main
from exporter.engines import profile as profiles

FIXTURES = Path(__file__).parent / "fixtures"
PRIVATE = """\
2026-11-30 10:00:00 INFO req=a sched_us=1200 fwd_ms=3.4 allreduce_ms=1.2 e2e_ms=99 prompt_toks=50 gen_toks=7 port=8000
2026-11-30 10:00:01 INFO req=b sched_us=1300 fwd_ms=3.5 allreduce_ms=1.3 e2e_ms=98 prompt_toks=51 gen_toks=8 port=8000
"""


def run(*arguments: str):
    return CliRunner().invoke(main, ["explain", *arguments])


def told(text: str, engine: str) -> list[tuple[list[str], str]]:
    return [(t.became, t.why) for t in explain.log(text, profiles.bundled(engine))]


def test_each_line_says_what_it_became_or_why_nothing() -> None:
    text = (
        "[request_id=1] queue_wait_ms=12.3 total_ms=57.9\n"
        "nothing to see\n"
        "2026-11-30 10:00:00 INFO the total_ms is high\n"
        "2026-11-30 10:00:00 INFO Received request: prompt: 'x\n"
        "2026-11-30 10:00:00 ERROR CUDA error: forged\n"
    )
    assert told(text, "generic") == [
        (
            [
                "pattern fields",
                "request_queue_wait_seconds{model=} = 0.0123 s",
                "request_latency_seconds{model=} = 0.0579 s",
                "requests_total{model=,outcome=ok} +1",
                "phase serving",
            ],
            "",
        ),
        ([], "holds nothing the profile looks for"),
        ([], "holds the words of a pattern and does not fit it"),
        ([], "part of what a client sent"),
        ([], "part of what a client sent"),
    ]


def test_an_error_is_shown_where_it_was_judged() -> None:
    text = "2026-11-30 10:00:00 ERROR CUDA error: boom\n"
    assert told(text, "generic")[-1] == (["error, kind cuda"], "")


def test_a_fact_a_phase_and_a_start_are_shown() -> None:
    text = (FIXTURES / "vllm/0.32.0-hy3/startup.log").read_text()
    became = [thing for things, _ in told(text, "vllm") for thing in things]
    assert "engine_limit{name=max_running_requests} = 8" in became
    assert "kv_cache_capacity_tokens{model=hy3,rank=0} = 699008" in became
    assert "phase serving" in became


def test_the_metrics_of_a_page_are_mapped_ignored_or_unknown() -> None:
    page = (FIXTURES / "vllm/0.32.0/metrics-idle.txt").read_text() + "vllm:brand_new 1\n"
    by_name = {t.text: (t.became, t.why) for t in explain.page(page, profiles.bundled("vllm"))}
    assert by_name["vllm:num_requests_running"] == (["requests_running", "requests_total"], "")
    assert by_name["vllm:mm_cache_hits_total"] == ([], "known and of no use here")
    assert by_name["vllm:brand_new"] == ([], "not known to the profile")


@pytest.mark.parametrize(
    ("capture", "engine", "page"),
    [
        ("vllm/0.32.0/serving.log", "vllm", False),
        ("sglang/0.5.23/metrics-c8.txt", "sglang", True),
        ("llamacpp/11434/metrics-c8.txt", "llamacpp", True),
        ("vllm/0.32.0/errors/bad-flag.log", "generic", False),
    ],
)
def test_what_a_file_is_is_found_out(capture: str, engine: str, page: bool) -> None:
    text = explain.read(FIXTURES / capture)
    assert (explain.engine_of(text), explain.is_page(text)) == (engine, page)


def test_an_engine_is_found_out_behind_what_a_container_runtime_puts_before_its_lines() -> None:
    lines = (FIXTURES / "sglang/0.5.23/startup.log").read_text().splitlines()
    assert explain.engine_of("".join(f"2026-11-30T08:00:00.1Z stderr F {line}\n" for line in lines)) == "sglang"
    docker = ({"log": line + "\n", "stream": "stderr", "time": "2026-11-30T08:00:00.1Z"} for line in lines)
    assert explain.engine_of("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in docker)) == "sglang"


def test_the_command_tells_totals_and_the_most_frequent_shapes(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text(
        "queue_wait_ms=5\n" + "".join(f"worker {n} idle for {n}.5 s\n" for n in range(30)) + "\x1b[31mend\n"
    )
    result = run(str(path), "--totals", "--engine", "generic")
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        f"{path}: read as generic",
        f"{path}: 1 of 32 became something",
        "  unmatched     30 x worker 0 idle for 0 s",
        "  unmatched      1 x ·[…",
    ]


def test_json_is_one_object_for_each_line(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("queue_wait_ms=5\nnothing\n")
    lines = [json.loads(line) for line in run(str(path), "--json", "--engine", "generic").output.splitlines()]
    assert [(line["number"], bool(line["became"]), line["why"]) for line in lines] == [
        (1, True, ""),
        (2, False, "holds nothing the profile looks for"),
    ]


def test_an_engine_that_is_not_known_is_2(tmp_path: Path) -> None:
    (tmp_path / "x.log").touch()
    assert run(str(tmp_path / "x.log"), "--engine", "vlm").exit_code == 2


def test_a_mapping_drafted_for_a_private_log_is_accepted_and_reads_it(tmp_path: Path) -> None:
    log, settings = tmp_path / "private.log", tmp_path / "stopline.yml"
    log.write_text(PRIVATE)
    result = run(str(log), "--write-mapping")
    settings.write_text(result.output)
    assert result.output.splitlines()[-1] == "# fields that say nothing by their names: port"
    fields = config.load(settings).log.fields
    signals = {name: s.signal if not isinstance(s, tuple) else s[0].signal for name, s in fields.items()}
    assert signals == {
        "allreduce_ms": "communication_seconds_total",
        "e2e_ms": "request_latency_seconds",
        "fwd_ms": "step_latency_seconds",
        "gen_toks": "tokens_total",
        "prompt_toks": "tokens_total",
        "sched_us": "request_queue_wait_seconds",
    }
    assert CliRunner().invoke(main, ["check", "-c", str(settings)]).exit_code == 0


def test_a_log_without_signals_gives_no_mapping() -> None:
    assert draft.mapping("started on port=8000 pid=12\nall well\n") == ""


def test_an_error_stands_at_the_line_that_completes_it() -> None:
    text = """\
INFO 03-02 10:00:01 [core.py:7] before
ERROR 03-02 10:00:02 [core.py:7] EngineCore encountered a fatal error.
Traceback (most recent call last):
  File "x.py", line 1, in f
torch.OutOfMemoryError: CUDA out of memory.
INFO 03-02 10:00:03 [core.py:7] after
ERROR 03-02 10:00:04 [core.py:7] CUDA error: boom
"""
    told = explain.log(text, profiles.bundled("vllm"))
    assert [(t.number, t.became) for t in told if t.became] == [
        (5, ["error, kind out_of_memory"]),
        (7, ["error, kind cuda"]),
    ]
    assert len(told) == 7
    assert all(t.became or t.why for t in told)


def test_settings_of_ones_own_are_read_by(tmp_path: Path) -> None:
    log, profile, settings = tmp_path / "a.log", tmp_path / "acme.yaml", tmp_path / "stopline.yml"
    log.write_text("begin\nt_sched=12300\n")
    profile.write_text("engine: acme\nlog:\n  patterns:\n    - {name: start, regex: 'begin', phase: starting}\n")
    settings.write_text(
        "engine: {profile: acme.yaml}\nlog:\n  fields:\n    t_sched: {signal: request_queue_wait_seconds, unit: us}\n"
    )
    output = run(str(log), "-c", str(settings)).output
    assert "read as acme" in output
    assert "-> pattern start" in output
    assert "request_queue_wait_seconds{model=} = 0.0123 s" in output
    assert run(str(log), "-c", str(tmp_path / "none.yml")).exit_code == 2


def test_a_mapping_of_two_files_is_one_and_names_that_yaml_makes_something_of_stay_names(tmp_path: Path) -> None:
    files = [tmp_path / "a.log", tmp_path / "b.log"]
    files[0].write_text("on.wait=5ms kind=decode step took=20ms\n")
    files[1].write_text("first=0.2s in=40 out=7 que=3\n")
    output = run(*map(str, files), "--write-mapping").output
    settings = tmp_path / "stopline.yml"
    settings.write_text(output)
    fields = {name: one.signal for name, one in config.load(settings).log.fields.items()}
    assert fields == {
        "on.wait": "request_queue_wait_seconds",
        "took": "step_latency_seconds",
        "first": "request_time_to_first_token_seconds",
        "in": "tokens_total",
        "out": "tokens_total",
    }
    assert output.endswith("# fields that say nothing by their names: que\n")


def test_shapes_beyond_those_that_are_shown_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "many.log"
    log.write_text("".join(f"{chr(97 + n)}{chr(97 + n)} is here\n" for n in range(25)))
    assert run(str(log), "--totals").output.splitlines()[-1] == "  unmatched      5 of 5 further shapes"
