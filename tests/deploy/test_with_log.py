"""The script that lets a server write its log into a file, too: status, signals, last lines, and size."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from manifests import DEPLOY

from exporter.sources.tail import Tailer

SCRIPT = DEPLOY / "kustomize/parts/with-log"
SHELLS = [s for s in ("dash", "bash", "busybox") if shutil.which(s)]


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> list[str]:
    return ["busybox", "sh"] if request.param == "busybox" else [request.param]


def _by_default() -> None:
    """What was ignored before, as in a job of a shell, cannot be trapped by another."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def run(shell: list[str], log: Path, script: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*shell, SCRIPT, log, "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/bin:/bin"} | environment,
        preexec_fn=_by_default,
    )


def test_both_outputs_are_in_the_file_and_where_they_were_and_the_status_is_kept(shell, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    process = run(shell, log, "echo one; echo two >&2; exit 3")
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out, log.read_text()) == (3, "one\ntwo\n", "one\ntwo\n")
    assert list(tmp_path.iterdir()) == [log]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_server_and_its_last_words_reach_the_file(shell, tmp_path: Path, number: int) -> None:
    log = tmp_path / "server.log"
    told = signal.SIGHUP if number == signal.SIGHUP else signal.SIGTERM
    process = run(shell, log, f"trap 'sleep 0.2; echo bye; exit 7' {int(told)}; echo up; while :; do sleep 0.05; done")
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out, log.read_text()) == (7, "bye\n", "up\nbye\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_a_signal_between_the_servers_own_processes_does_what_it_does_without_the_script(
    shell, tmp_path: Path, number: int
) -> None:
    """A shell has what it starts beside itself ignore these two; a worker that ends its parent by one would fail to."""
    process = run(shell, tmp_path / "server.log", f"kill -{int(number)} $$; echo survived; exit 5")
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (128 + number, "")


def test_a_file_that_cannot_be_cut_does_not_hold_the_server_up(shell) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, other = Path(name), {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        folder.chmod(0o777)
        script = shutil.copy(SCRIPT, folder)
        log = folder / "server.log"
        log.write_bytes(b"x" * 5000)
        log.chmod(0o444)
        lines = "i=0; while [ $i -lt 80 ]; do printf '%01000d\\n' $i; sleep 0.02; i=$((i+1)); done"
        done = subprocess.run(
            [*shell, script, log, "sh", "-c", lines],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": "/usr/bin:/bin", "STOPLINE_LOG_BYTES": "1000", "STOPLINE_LOG_LOOK": "0.2"},
            **other,
        )
    assert (done.returncode, [int(line) for line in done.stdout.splitlines()]) == (0, list(range(80)))


def test_a_server_that_was_killed_is_told_as_a_container_runtime_tells_it(shell, tmp_path: Path) -> None:
    process = run(shell, tmp_path / "server.log", "echo dying; kill -KILL $$")
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGKILL


def test_what_a_crash_prints_at_the_last_moment_is_in_the_file(shell, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    process = run(shell, log, "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done; exit 1")
    process.communicate(timeout=20)
    assert log.read_text().splitlines()[-1] == "line 1999"


def test_without_a_place_for_the_log_the_server_runs_all_the_same(shell, tmp_path: Path) -> None:
    process = run(shell, tmp_path / "nowhere/server.log", "echo still; exit 4")
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (4, "still\n")


def test_the_file_is_bounded_and_who_follows_it_loses_no_line(shell, tmp_path: Path) -> None:
    """A thousand lines a second; cut twice meanwhile."""
    log = tmp_path / "server.log"
    writer = "i=0; while [ $i -lt 40 ]; do seq $((i*100+1)) $((i*100+100)); sleep 0.1; i=$((i+1)); done"
    process = run(shell, log, writer, STOPLINE_LOG_BYTES="4096", STOPLINE_LOG_LOOK="0.5")
    tailer = Tailer(log, checkpoint=None, clock=time.monotonic, wall=time.time, from_start=True)
    seen, largest = [], 0
    while process.poll() is None:
        seen += [line for chunk in tailer.poll() for line in chunk.data.splitlines()]
        largest = max(largest, log.stat().st_size if log.exists() else 0)
        time.sleep(0.05)
    seen += [line for chunk in tailer.poll() for line in chunk.data.splitlines()]
    tailer.close()
    assert [int(line) for line in seen] == list(range(1, 4001))
    assert tailer.stats.truncations >= 2
    assert largest < 15_000  # the whole has 19 kB
    process.communicate()
