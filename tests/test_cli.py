"""The commands: flags, environment, exit codes, and what they print."""

import json
import logging
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from exporter import cli
from exporter.cli import main
from exporter.engines import profile as profiles

FAULTS = Path(__file__).parent / "fixtures" / "config"


def invoke(*arguments: str, env: dict[str, str] | None = None):
    return CliRunner().invoke(main, arguments, env=env)


def test_check_accepts_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "stopline.yml"
    path.write_text("engine: {url: 'http://127.0.0.1:8000'}\n")
    result = invoke("check", "-c", str(path))
    assert (result.exit_code, result.stdout) == (0, f"{path}: ok\n")


@pytest.mark.parametrize("fault", sorted(p.stem for p in FAULTS.glob("*.yml")))
def test_check_exits_2_on_every_fault(fault: str) -> None:
    result = invoke("check", "-c", str(FAULTS / f"{fault}.yml"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{fault}.yml" in result.stderr


def test_a_file_that_is_not_there_or_cannot_be_read(tmp_path: Path) -> None:
    result = invoke("check", "-c", str(tmp_path / "none.yml"))
    assert (result.exit_code, result.stderr) == (2, f"{tmp_path / 'none.yml'}: no such file\n")
    result = invoke("check", "-c", str(tmp_path))
    assert (result.exit_code, result.stderr) == (2, f"{tmp_path}: cannot be read: Is a directory\n")


def test_check_warns_of_what_is_probably_not_meant(tmp_path: Path) -> None:
    path = tmp_path / "stopline.yml"
    path.write_text("log:\n  patterns:\n    - {name: slow, regex: '\\d+ [a-z]+'}\n")
    result = invoke("check", "-c", str(path))
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        f"{path}: warning: no engine is watched, only GPUs: neither engine.url nor log.paths is set",
        f"{path}: warning: log.patterns: slow: the regex holds no certain text of three characters, "
        "so it is tried on every line; add 'contains'",
    ]


def test_check_reads_a_profile_of_your_own(tmp_path: Path) -> None:
    profile, path = tmp_path / "mine.yaml", tmp_path / "stopline.yml"
    path.write_text(f"engine: {{profile: {profile}}}\n")
    profile.write_text("engine: mine\nmetrics:\n  requests_runing: {sample: my_running}\n")
    result = invoke("check", "-c", str(path))
    assert result.exit_code == 2
    assert result.stderr == (
        f"{profile}:3: metrics.requests_runing: no family 'requests_runing' in the catalog "
        "(did you mean 'requests_running'?)\n"
    )


def test_check_runs_the_samples_you_wrote(tmp_path: Path) -> None:
    profile, path = tmp_path / "mine.yaml", tmp_path / "stopline.yml"
    profile.write_text(r"""
engine: mine
log:
  patterns:
    - name: wait
      regex: 'waited (?P<ms>\d+) ms'
      signals: [{signal: request_queue_wait_seconds, value: ms, unit: ms}]
      samples:
        - {line: 'waited 12 ms', gives: {'request_queue_wait_seconds{model=}': 0.013}}
        - {line: 'waits 12 ms'}
      rejects: ['waited 12 ms for nothing']
  errors:
    gates: ['lost']
    shapes: ['lost ']
    samples: [{lines: 'lost the card', kinds: [cuda]}]
""")
    path.write_text(f"engine: {{profile: {profile}}}\n")
    result = invoke("check", "-c", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        f"{profile}: pattern wait: 'waited 12 ms' gives {{'request_queue_wait_seconds{{model=}}': 0.012}}, "
        "not request_queue_wait_seconds{model=}: 0.013",
        f"{profile}: pattern wait: does not match its sample 'waits 12 ms'",
        f"{profile}: pattern wait: matches what it should reject, 'waited 12 ms for nothing'",
        f"{profile}: errors: 'lost the card' counts {{'other': 1}}, not cuda",
    ]


def test_a_profile_is_looked_for_beside_the_settings(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "stopline.yml"
    path.write_text("engine: {profile: mine.yaml}\n")
    monkeypatch.chdir("/")
    result = invoke("check", "-c", str(path))
    assert (result.exit_code, result.stderr) == (2, f"engine.profile: {tmp_path / 'mine.yaml'}: no such file\n")
    (tmp_path / "mine.yaml").write_text("engine: mine\n")
    assert invoke("check", "-c", str(path)).exit_code == 0


def test_a_sample_that_is_never_looked_at_says_why(tmp_path: Path) -> None:
    path = tmp_path / "stopline.yml"
    path.write_text("engine: {profile: mine.yaml}\n")
    (tmp_path / "mine.yaml").write_text(
        "engine: mine\nlog: {errors: {samples: [{lines: 'it stuck', kinds: [hang]}]}}\n"
    )
    assert invoke("check", "-c", str(path)).stderr == (
        f"{tmp_path / 'mine.yaml'}: errors: 'it stuck' counts no error, not hang "
        "(no line holds one of log.errors.gates, so none is looked at)\n"
    )


@pytest.fixture
def ran(monkeypatch):
    """The settings ``run`` would start with."""
    seen = []
    monkeypatch.setattr(cli, "_guard", lambda start, config: seen.append(config))
    return seen


def test_flags_stand_above_environment_above_file(tmp_path: Path, ran) -> None:
    path = tmp_path / "stopline.yml"
    path.write_text("engine: {url: 'http://file:1', model: file}\nlogging: {level: error}\nstate_dir: /file\n")
    env = {"STOPLINE_ENGINE_URL": "http://env:1", "STOPLINE_MODEL": "env", "STOPLINE_LOG": "/a.log /b.log"}
    result = invoke("run", "-c", str(path), "--engine-url", "http://flag:1", "--gpus", "0,GPU-b", env=env)
    assert result.exit_code == 0, result.output
    (config,) = ran
    assert (config.engine.url, config.engine.model, config.logging.level) == ("http://flag:1", "env", "error")
    assert config.log.paths == ("/a.log", "/b.log")
    assert config.gpus.devices == ("0", "GPU-b")
    assert str(config.state_dir) == "/file"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--engine-url", "localhost"),
            "engine.url must start with http:// or https:// and name a host, got 'localhost'",
        ),
        (("--web.listen-address", "x"), "web.listen_address must be [HOST]:PORT, got 'x'"),
        (("--web.listen-address", "::1:80"), "web.listen_address must have an IPv6 host in brackets: [::1]:80"),
        (
            ("--web.listen-address", "[::g]:80"),
            "web.listen_address must have an IPv6 address in its brackets, got [::g]",
        ),
        (
            ("--engine", "vlm"),
            f"engine.name must be auto or one of {', '.join(profiles.names())}, got 'vlm'",
        ),
        (("--log.level", "loud"), "logging.level must be one of debug, info, warning, error, got 'loud'"),
    ],
)
def test_a_bad_flag_is_one_line_and_2(flags, message: str, ran) -> None:
    result = invoke("run", *flags)
    assert (result.exit_code, result.stderr, ran) == (2, message + "\n", [])


LINE = "[request_id=xxx] total_ms=57.9 kv_cache_usage={}\n"


def test_doctor_exits_0_if_every_line_can_be_judged_and_says_so_in_json_too(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(LINE.format(0.4))
    os.utime(log, (2e9, 2e9))  # not old yet, however slow this machine is
    arguments = ("doctor", "--log", str(log), "--gpus", "none", "--model", "m", "--state-dir", "/s", "--seconds", "0.1")
    text, object_ = invoke(*arguments), invoke(*arguments, "--json")
    assert (text.exit_code, text.stderr, object_.exit_code, object_.stderr) == (0, "", 0, "")
    report = json.loads(object_.stdout)
    assert report == {
        "findings": [
            _found("log", "ok", f"{log} can be read: {len(LINE.format(0.4))} B, last written 0 s ago"),
            _found(
                "log",
                "note",
                "nothing was written to it in 0.1 s",
                "an idle engine may be silent: send it a request; else compare the path with where the server writes",
            ),
            _found("log", "ok", "lines read: 1; understood, by pattern: fields 1"),
            _found("engine", "ok", "none that is known; the fields of its log are read"),
            _found("engine", "ok", "it is up, phase serving"),
            _found(
                "engine",
                "warning",
                "no metrics page is read: engine.url is not set",
                "give --engine-url: the page has exact counts",
            ),
            _found("engine", "ok", "model m"),
            _found("gpus", "note", "none are read: gpus.devices is none"),
        ],
        "lines": [
            {"line": "latency", "judged": True, "why": "from the log"},
            {"line": "errors", "judged": True, "why": "from the log"},
            {"line": "memory", "judged": True, "why": "from the use of the KV cache"},
        ],
    }
    told = [f"  {f['status']:8} {f['finding']}" for f in report["findings"]]
    told += [f"  {v['line']:8} can be judged: {v['why']}" for v in report["lines"]]
    groups = ["log", "engine", "gpus", "stop lines"]
    remedies = [" " * 11 + f["remedy"] for f in report["findings"] if f["remedy"]]
    assert sorted(text.stdout.splitlines()) == sorted([*told, *groups, *remedies])


def _found(group: str, status: str, finding: str, remedy: str = "") -> dict[str, str]:
    return {"group": group, "status": status, "finding": finding, "remedy": remedy}


def test_doctor_exits_1_if_a_line_cannot_be_judged() -> None:
    result = invoke("doctor", "--gpus", "none", "--seconds", "0.1")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[:2] == [
        "settings",
        "  note     no engine is watched, only GPUs: neither engine.url nor log.paths is set",
    ]


def test_doctor_says_what_is_wrong_with_its_settings(tmp_path: Path) -> None:
    result = invoke("doctor", "--engine", "vlm")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("engine.name must be auto or one of deepinfer, ")
    path = tmp_path / "stopline.yml"
    path.write_text("engine: {url: 'https://127.0.0.1:9'}\nscrape: {ca_file: /none.pem}\n")
    result = invoke("doctor", "-c", str(path), "--gpus", "none")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "scrape.ca_file: /none.pem: [Errno 2] No such file or directory\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prometheus", "prom:9090"), "must start with http:// or https:// and name a host, got 'prom:9090'"),
        (("--grafana", "http://"), "must start with http:// or https:// and name a host, got 'http://'"),
        (("--seconds", "0"), "0.0 is not in the range 0.1<=x<=3600."),
    ],
)
def test_doctor_refuses_a_bad_flag(flags: tuple[str, str], message: str) -> None:
    result = invoke("doctor", *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == f"Error: Invalid value for '{flags[0]}': {message}"


def test_doctor_logs_only_what_it_is_asked_to(tmp_path: Path) -> None:
    arguments = ("doctor", "--log", str(tmp_path / "none.log"), "--gpus", "none", "--seconds", "0.1")
    assert invoke(*arguments).stderr == ""
    assert "log not readable" in invoke(*arguments, "--log.level", "info").stderr


def test_run_and_doctor_take_the_same_settings() -> None:
    run, doctor = (main.commands[name].params for name in ("run", "doctor"))
    assert [p.opts for p in doctor[: len(run)]] == [p.opts for p in run]


def test_unknown_options_and_commands_are_2() -> None:
    assert invoke("run", "--nonsense").exit_code == 2
    assert invoke("nonsense").exit_code == 2


def test_json_log_lines_are_objects(capsys) -> None:
    cli.set_up_logging(cli.settings.LoggingConfig(format="json"))
    try:
        raise ValueError("x\ny")
    except ValueError:
        logging.getLogger("exporter.x").exception("bad: %s", 'a "quote"\n')
    entry = json.loads(capsys.readouterr().err)
    assert (entry["level"], entry["logger"], entry["message"]) == ("error", "exporter.x", 'bad: a "quote"\n')
    assert entry["exception"].endswith("ValueError: x\ny")


@pytest.fixture(autouse=True)
def _restore_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    assert sys.stderr
