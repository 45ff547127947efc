"""`stopline ramp` and `stopline compare` as a user types them."""

import asyncio
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from measured import engine, level
from realengine import free_port, get, until

from exporter import strictyaml
from exporter.baseline import Pins
from exporter.cli import main
from exporter.load import commands, result
from exporter.load.result import File, Run
from exporter.simulator import EngineConfig, Simulation, serve

pytest_plugins = ("fake_nvml",)

FIXTURES = Path(__file__).parent.parent / "fixtures" / "load"
SHORT = ("--input-tokens=4", "--output-tokens=6", "--requests=60", "--warm-up=2", "--pause=0", "--baselines=1")
GIB = 2**30


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A simulated server with two places, in a thread of its own; its log is server.log."""
    told: list[str] = []
    ready, ended = threading.Event(), threading.Event()

    async def run() -> None:
        config = EngineConfig.tiny(max_running_requests=2, kv_blocks=8192, kv_bytes_per_token=2**15)
        async with serve(Simulation(config, seed=1, log=tmp_path / "server.log")) as address:
            told.append(address)
            ready.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(10)
    yield told[0]
    ended.set()
    thread.join(10)


def test_a_ramp_from_the_first_level_to_the_files(url: str, tmp_path: Path) -> None:
    out, pins, metrics, drawn = (tmp_path / name for name in ("r.json", "b.yaml", "r.prom", "r.svg"))
    files = ("--out", out, "--pin", pins, "--textfile", metrics, "--picture", drawn)
    done = invoke("ramp", "--url", url, "--levels", "1,32", "--no-refine", *SHORT, *files)
    assert done.exit_code == 1, done.output
    assert re.search(
        r"^verdict: latency line crossed at concurrency 32: P99 .* is \d+\.\d\d times the", done.stdout, re.M
    )
    assert "warm-up: 2 requests or more, not measured\nconcurrency 1: P50" in done.stderr
    (run,) = result.read(out.read_bytes(), "r.json").runs
    assert [one.concurrency for one in run.levels] == [1, 32]
    assert strictyaml.load(pins, Pins).pins[2].seconds == pytest.approx(run.levels[0].latency.p99, abs=1e-6)
    assert 'stopline_ramp_tripped{line="latency",model="tiny"} 1.0' in metrics.read_text()
    assert drawn.read_text().startswith("<svg ")


def test_all_levels_under_the_lines_are_good(url: str) -> None:
    options = ("--levels", "1,2", "--latency-ratio", "100", *SHORT)
    done = invoke("ramp", "--url", f"{url}/v1", "--api", "chat", *options, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["runs"][0]
    assert told["verdict"]["text"] == "no line crossed up to concurrency 2"
    assert told["conditions"]["api"] == "chat"


def test_a_sweep_prints_its_tables(url: str, tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    vary = ("--vary", "batch=1,2", "--vary", "concurrency=1,2", "--apply", "true {value}", "--fix", "concurrency=2")
    done = invoke(
        "ramp", "--url", url, *SHORT, "--requests", "10", *vary, "--fix", "batch=4", "--markdown", "--out", out
    )
    assert done.exit_code == 0, done.output
    heads = [line.split(" | ")[1] for line in done.stdout.splitlines() if line.startswith("| step")]
    assert heads == ["batch", "concurrency"]
    assert result.read(out.read_bytes(), "").varied == ["batch", "concurrency"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--levels", "2,1"), "must rise and begin at 1 or above, got '2,1'"),
        (("--levels", "a"), "must be numbers such as 1,2,4,8, got 'a'"),
        (("--url", "localhost:8000"), "must start with http:// or https:// and name a host, got 'localhost:8000'"),
        (("--input-tokens", "x"), "must be a number of tokens such as 256, or a range such as 64-512, got 'x'"),
        (("--vary", "batch"), "must be NAME=VALUE,VALUE,… such as batch=1,2,4,8, got 'batch'"),
        (("--vary", "batch=1,2"), "--vary batch needs --apply: a command that sets batch to {value}"),
        (("--vary", "batch=1,2", "--apply", "x"), "--apply must hold {value}, which each value takes the place of"),
        (("--condition", "x"), "must be NAME=VALUE, got 'x'"),
        (("--out", "/none/r.json"), "/none/r.json: there is no directory /none"),
        (("--token-file", "/none/t"), "/none/t: cannot be read: No such file or directory"),
        (("--body", "/none/b"), "/none/b: no such file"),
        (("--template", "/none/t"), "--template is for --api generate; the other APIs know their body"),
        (("--max-seconds", "nan"), "'--max-seconds': must be a finite number, got nan"),
        (("--timeout", "inf"), "'--timeout': must be a finite number, got inf"),
        (("--latency-ratio", "inf"), "'--latency-ratio': must be a finite number, got inf"),
        (("--pause", "1e999"), "'--pause': must be a finite number, got 1e999"),
        (("--levels", f"1,{10**14}"), "--levels: 100000000000000 clients make more requests than --max-requests 20000"),
        (
            ("--vary", f"concurrency=1,{10**14}"),
            "--vary concurrency: 100000000000000 clients make more requests than --max-requests 20000",
        ),
        (
            ("--vary", "batch=1,2", "--apply", "{value}", "--fix", "concurrency=20001"),
            "--fix concurrency: 20001 clients make more requests than --max-requests 20000",
        ),
        (
            ("--vary", "concurrency=1,2", "--fix", "concurrency=many"),
            "--fix concurrency must be a whole number above 0, got 'many'",
        ),
        (
            ("--levels", f"{10**14}", "--max-requests", f"{10**15}"),
            "--levels: 100000000000000 clients need as many open files, and no more than ",
        ),
        (("--warm-up", "20001"), "--warm-up: 20001 is more than --max-requests 20000"),
        (("--requests", "0"), "0 is not in the range x>=1"),
        ((), "http://127.0.0.1:9/v1/models does not tell a model; is the server up? Give --model"),
    ],
)
def test_what_cannot_be_measured(arguments: tuple[str, ...], problem: str) -> None:
    done = invoke("ramp", "--url", "http://127.0.0.1:9", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert problem in done.stderr


def test_ctrl_c_gives_the_result_so_far(url: str, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    command = [sys.executable, "-m", "exporter", "ramp", "--url", url, "--levels", "1,2", *SHORT, "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--requests", "5000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("warm-up"):
            break
    until(
        lambda: "num_requests_running{" in get(f"{url}/metrics") and _finished(url) > 20, 20, "some requests are done"
    )
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=10)
    assert process.returncode == 1, errors
    assert "verdict: no line crossed so far, no level was completed; not all levels were measured" in printed
    assert "note: interrupted" in printed
    (run,) = result.read(out.read_bytes(), "r.json").runs
    assert 0 < run.levels[0].requests < 5000
    assert not run.levels[0].complete


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes requests and never answers one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, None])
def test_a_warm_up_without_answers_ends_with_all_files_but_pins(
    silent: str, tmp_path: Path, number: int | None
) -> None:
    names = ("out", "pin", "textfile", "picture")
    files = [f"--{name}={tmp_path / name}" for name in names]
    command = [sys.executable, "-m", "exporter", "ramp", "--url", silent, "--model", "m", *files]
    seconds = "600" if number else "0.5"
    process = subprocess.Popen(
        [*command, "--max-seconds", seconds], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("warm-up"):
            break
    if number:
        process.send_signal(number)
    printed, errors = process.communicate(timeout=20)
    assert process.returncode == 1, errors
    assert "verdict: no line crossed so far, no level was completed; not all levels were measured" in printed
    assert f"note: {'interrupted' if number else '--max-seconds 0.5 are over'}" in printed
    assert "no pins are written, what is there stays: no level was measured" in errors
    assert {path.name for path in tmp_path.iterdir()} == set(names) - {"pin"}


async def test_only_a_late_second_signal_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hasty(stop: asyncio.Event) -> int:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.01)
        assert stop.is_set()
        return 7

    assert await commands._interruptible(hasty) == 7
    monkeypatch.setattr(commands, "_PATIENCE", 0.0)
    assert await commands._interruptible(hasty) == 1


def test_a_second_ctrl_c_loses_no_file(silent: str, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    command = [sys.executable, "-m", "exporter", "ramp", "--url", silent, "--model", "m", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("warm-up"):
            break
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    printed, errors = process.communicate(timeout=20)
    assert (process.returncode, "note: interrupted" in printed) == (1, True), errors
    assert result.read(out.read_bytes(), "r.json").runs[0].levels == []


def _finished(url: str) -> float:
    page = get(f"{url}/metrics")
    return sum(float(n) for n in re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", page, re.M))


def test_memory_ends_a_ramp_as_the_sidecar_sees_it(url: str, tmp_path: Path, nvml_library: Path, hardware) -> None:
    """The GPU fills up while the second level runs: what the command before it does."""
    full = tmp_path / "full"
    healthy = {"gpu0.total": 80 * GIB, "gpu0.used": 60 * GIB}
    hardware.set(healthy)
    text = hardware.state.read_text()
    full.write_text(text.replace(f"gpu0.used={60 * GIB}", f"gpu0.used={int(79.5 * GIB)}"))
    reset = f"if [ -e {tmp_path}/once ]; then mv {full} {hardware.state}; else touch {tmp_path}/once; fi"
    port, out = free_port(), tmp_path / "r.json"
    sidecar = subprocess.Popen(
        [sys.executable, "-m", "exporter", "run", "--engine-url", url, "--log", str(tmp_path / "server.log"),
         "--gpus", "all", "--web.listen-address", f"127.0.0.1:{port}"],
        env=os.environ | {"LD_LIBRARY_PATH": str(nvml_library.parent)} | hardware.env,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        until(lambda: "stopline_gpu_memory_used_bytes{" in get(f"http://127.0.0.1:{port}/metrics"), 20, "GPUs are read")
        options = ("--levels", "1,2,4", "--reset", reset, "--sidecar", f"http://127.0.0.1:{port}", "--out", out)
        done = invoke("ramp", "--url", url, *SHORT, "--latency-ratio", "100", *options)
    finally:
        sidecar.terminate()
        _, errors = sidecar.communicate(timeout=10)
    assert (done.exit_code, sidecar.returncode) == (1, 0), done.output + errors.decode()
    assert (
        "verdict: memory line crossed at concurrency 2: GPU 0 has 0.50 GiB free, under 1.00 GiB; "
        "concurrency 1 is the last good level\n"
    ) in done.stdout
    (run,) = result.read(out.read_bytes(), "r.json").runs
    assert [round((one.memory_peak or 0) / GIB, 1) for one in run.levels] == [60.0, 79.5]
    first = run.levels[0].engine
    assert first is not None
    assert first.steps["decode"].count > 0
    assert first.queue_wait.p99 is not None
    assert run.identity["model"] == "tiny"
    assert run.conditions["engine"] == "vllm"
    assert run.conditions["parallelism"] == "TP 1 / PP 1"


def test_a_file_that_cannot_be_written_costs_no_other_and_not_the_table(url: str, tmp_path: Path) -> None:
    out, pins = tmp_path / "r.json", tmp_path / "b.yaml"
    (tmp_path / ".r.json.new").mkdir()
    short = (*SHORT, "--latency-ratio", "1000")
    done = invoke("ramp", "--url", url, "--levels", "1", *short, "--out", out, "--pin", pins)
    assert done.exit_code == 2
    assert "verdict: no line crossed up to concurrency 1\n" in done.stdout
    assert done.stderr.endswith(f"\n{out}: not written: Is a directory\n")
    assert strictyaml.load(pins, Pins).pins


def test_two_files_of_one_name_are_refused_before_the_load(tmp_path: Path) -> None:
    done = invoke("ramp", "--out", tmp_path / "a", "--pin", tmp_path / "." / "a")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"{tmp_path / 'a'}: is given for two files, one of which would be lost; name another\n"


@pytest.mark.parametrize("flag", ["--pin", "--textfile", "--picture"])
def test_a_sweep_refuses_the_files_of_a_limit(flag: str, tmp_path: Path) -> None:
    done = invoke("ramp", "--vary", "concurrency=1,2", flag, tmp_path / "a")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"{flag}: --vary looks for no limit and has none to write; leave it out, or use --out\n"


def test_a_directory_that_may_not_be_written_is_told_before_the_load() -> None:
    done = invoke("ramp", "--out", "/proc/self/fdinfo/r.json")
    assert (done.exit_code, done.stdout) == (2, "")
    why = "No such file or directory; choose another directory"
    assert done.stderr == f"/proc/self/fdinfo/r.json: cannot be written: {why}\n"


def test_a_baseline_that_fails_gives_no_pins(tmp_path: Path) -> None:
    pins = tmp_path / "b.yaml"
    pins.write_text("pins: []  # good ones of before\n")
    with answering(500) as url:
        done = invoke("ramp", "--url", url, "--model", "m", "--levels", "1,2", *SHORT, "--pin", pins)
    assert done.exit_code == 1
    why = "the errors line was crossed at the baseline, concurrency 1: 10 server_error"
    assert f"{pins}: no pins are written, what is there stays: {why}\n" in done.stderr
    assert pins.read_text() == "pins: []  # good ones of before\n"


@contextmanager
def answering(status: int) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_error(status)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


def two(tmp_path: Path, **changes: str) -> tuple[Path, Path]:
    paths = tmp_path / "tp1.json", tmp_path / "tp2.json"
    for path, latency, layout in zip(paths, (1.0, 0.9), ("TP 1 / PP 1", "TP 2 / PP 1"), strict=True):
        run = Run({"parallelism": layout, "dtype": "float16"}, [level(4, [latency] * 60, engine=engine())])
        result.write(path, File(1, [run]))
    return paths


def test_compare_says_where_to_stay(tmp_path: Path) -> None:
    paths = two(tmp_path)
    done = invoke("compare", *paths)
    assert done.exit_code == 1
    last = done.stdout.splitlines()[-1]
    assert last == "verdict: stay at parallelism TP 1 / PP 1, because of column memory per GPU: 40% of the fullest GPU " \
        "is needed at parallelism TP 1 / PP 1, under 90%: it holds this concurrency as it is; " \
        "column ΔT: +11.1% throughput, under 20%"  # fmt: skip
    drawn = tmp_path / "c.svg"
    good = invoke("compare", *paths, "--min-gain", "0.1", "--memory-ratio", "0", "--picture", drawn, "--json")
    assert (good.exit_code, json.loads(good.stdout)["stay"]) == (0, None)
    assert drawn.read_text().startswith("<svg ")


def test_compare_refuses_two_differences(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    done = invoke("compare", one, f"{other}@dtype=int8")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "the runs differ in 2 variables, and only one may: parallelism, dtype"
    assert invoke("compare", one, f"{other}@dtype=int8", "--ignore", "dtype", "--markdown").exit_code == 1
    assert invoke("compare", one).exit_code == 2
    assert invoke("compare").exit_code == 2
    assert "must be a finite number, got inf" in invoke("compare", one, other, "--min-gain", "inf").stderr


def test_compare_refuses_one_file_twice(tmp_path: Path) -> None:
    one, _ = two(tmp_path)
    (tmp_path / "again.json").symlink_to(one)
    for other in (one, f"{one}@batch=2", tmp_path / "again.json"):
        done = invoke("compare", one, other)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr == f"{other}: is the same file as {one}; give two results\n"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"latencies": ["NaN"]}, "latencies at concurrency 4 holds a number that is negative or none (NaN)"),
        ({"latencies": [-1.0]}, "latencies at concurrency 4 holds a number that is negative or none (NaN)"),
        ({"latency": {"p99": "nan"}}, "latency at concurrency 4 holds a number that is negative or none (NaN)"),
        ({"concurrency": -1}, "a level has concurrency -1, and must have 1 or more"),
        ({"concurrency": 0}, "a level has concurrency 0, and must have 1 or more"),
    ],
)
def test_compare_refuses_what_nobody_measured(change: dict[str, object], problem: str, tmp_path: Path) -> None:
    one, other = two(tmp_path)
    document = json.loads(other.read_text())
    document["runs"][0]["levels"][0] |= change
    other.write_text(json.dumps(document))
    done = invoke("compare", one, other)
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"{other}: {problem}\n")


def test_compare_reads_what_hey_wrote() -> None:
    done = invoke(
        "compare", f"{FIXTURES / 'hey.txt'}@concurrency=4,batch=1", f"{FIXTURES / 'hey.csv'}@concurrency=4,batch=2"
    )
    assert done.exit_code == 0
    assert "throughput  44.54 req/s -> 47.92 req/s, ΔT +7.6%" in done.stdout
