"""deploy/systemd: systemd's own checks, the command of the unit behind its restrictions, and logrotate on its file."""

import gzip
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from confined import setting
from manifests import DEPLOY, ROOT
from process import Process, fetch
from realengine import Page, free_port, until

SYSTEMD = DEPLOY / "systemd"
UNIT = (SYSTEMD / "stopline.service").read_text()
INSTALLED = "/opt/stopline/bin/stopline"
HERE = Path(__file__).parent
FORBIDDEN = """
import ctypes, socket
print(ctypes.CDLL(None).ptrace(0, 0, 0, 0), end=" ")
try:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
except PermissionError:
    print("refused")
"""
"""To be traced is no call of a service, and a netlink socket is of no family that the unit names."""
EXPOSURE = 25
"""The most that `systemd-analyze security` may find, of 100."""


def lines(first: int, last: int) -> str:
    """One for each request from *first* to before *last*."""
    return "".join(
        f"[request_id={n:04}] queue_wait_ms=12.3 step_latency_ms=45.6 total_ms=57.9\n" for n in range(first, last)
    )


def eventually(condition: Callable[[], object]) -> None:
    until(condition, 30, "what the test waits for")


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with the program where it is here."""
    path = tmp_path / "stopline.service"
    path.write_text(UNIT.replace(INSTALLED, str(Path(sys.executable).parent / "stopline")))
    return path


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


def test_systemd_takes_every_line_of_the_unit(unit: Path) -> None:
    result = analyze("verify", unit)
    assert (result.returncode, result.stderr) == (0, "")


def test_systemd_tells_a_line_that_it_does_not_know(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHomes="))
    assert "Unknown key 'ProtectHomes' in section [Service]" in analyze("verify", unit).stderr


def test_systemd_takes_what_sends_the_log_of_an_engine_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "engine.service").write_text("[Service]\nExecStart=/bin/true\n")
    (tmp_path / "engine.service.d").mkdir()
    (tmp_path / "engine.service.d/log.conf").write_text((SYSTEMD / "engine-log.conf").read_text())
    result = analyze("verify", tmp_path / "engine.service")
    assert (result.returncode, result.stderr) == (0, "")


def test_the_unit_is_exposed_to_little(unit: Path) -> None:
    result = analyze("security", "--offline=true", f"--threshold={EXPOSURE}", unit)
    assert result.returncode == 0, result.stdout[-400:]


@pytest.fixture
def machine() -> Iterator[Path]:
    """A directory that any user may read, for what the unit has under /etc and /var."""
    with TemporaryDirectory(prefix="stopline-unit-") as name:
        path = Path(name)
        path.chmod(0o755)
        (path / "state").mkdir()
        (path / "server.log").touch()
        given = (SYSTEMD / "stopline.yml").read_text()
        for real, here in (("/var/log/engine", path), ("/var/lib/stopline", path / "state")):
            assert real in given
            given = given.replace(real, str(here))
        (path / "stopline.yml").write_text(given)
        yield path


def somebody() -> int:
    """A user that is not root; root itself, without a capability, where nobody else may read this checkout."""
    needed = (*ROOT.parents, ROOT, *Path(sys.executable).parents, *Path(sys.executable).resolve().parents)
    return 65532 if all(path.stat().st_mode & 0o001 for path in needed) else 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take the file system away")
def test_its_command_does_all_its_work_behind_the_restrictions_of_the_unit(machine: Path, unit: Path) -> None:
    """Another user, no capability, all but the state read-only, and the filters of system calls and of sockets."""
    port, user, state = free_port(), somebody(), machine / "state"
    settings = machine / "stopline.yml"
    os.chown(state, user, user)
    told = f"web: {{listen_address: '127.0.0.1:{port}'}}\n"
    settings.write_text(settings.read_text() + told)
    checked, command = (
        [
            word.replace(INSTALLED, str(Path(sys.executable).parent / "stopline")).replace(
                "/etc/stopline/stopline.yml", str(settings)
            )
            for word in setting(UNIT, name).split()
        ]
        for name in ("ExecStartPre", "ExecStart")
    )
    assert setting(UNIT, "ProtectSystem") == "strict"
    assert setting(UNIT, "CapabilityBoundingSet") == ""
    script = f"""
        mount --bind {state} {state}
        mount -o remount,bind,ro /
        exec setpriv --reuid={user} --regid={user} --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs \
            {sys.executable} {HERE / "confined.py"} {SYSTEMD / "stopline.service"} "$@"
    """
    confined = ["unshare", "--mount", "--propagation", "private", "bash", "-ec", script, "-"]
    touched = subprocess.run([*confined, "touch", machine / "x"], capture_output=True, text=True, check=False)
    assert "Read-only file system" in touched.stderr
    tried = subprocess.run([*confined, sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, check=False)
    assert (tried.returncode, tried.stdout) == (0, "-1 refused\n"), tried.stderr
    assert subprocess.run([*confined, *checked], capture_output=True, check=False).returncode == 0
    process = subprocess.Popen([*confined, *command], stderr=subprocess.PIPE, text=True)
    try:
        page = lambda: Page(fetch(port))  # noqa: E731
        eventually(lambda: fetch(port, "/-/ready"))
        with (machine / "server.log").open("a") as log:
            log.write(lines(0, 1))
        eventually(lambda: page()("requests_total", outcome="ok") == 1)
        settings.write_text(settings.read_text() + "thresholds: {latency_ratio: 3}\n")
        process.send_signal(signal.SIGHUP)  # as ExecReload does
        eventually(lambda: page()("threshold", line="latency_ratio") == 3)
        process.terminate()
        _, errors = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert list(state.iterdir())


def test_logrotate_cuts_the_log_and_no_line_is_lost_or_counted_twice(tmp_path: Path) -> None:
    """Lines that come while it copies may be lost, as the README says; so none comes then."""
    log, rules = tmp_path / "server.log", tmp_path / "engine"
    log.touch()
    given = (SYSTEMD / "stopline.logrotate").read_text()
    rules.write_text(given.replace("/var/log/engine/server.log", str(log)))
    assert rules.read_text() != given
    rules.chmod(0o644)

    def rotate(*options: str) -> None:
        command = ["/usr/sbin/logrotate", *options, "--state", tmp_path / "state", rules]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (0, ""), shlex.join(map(str, command))

    def write(first: int, last: int) -> None:
        with log.open("a") as file:
            file.write(lines(first, last))

    with Process("--log", str(log), "--gpus", "none", "--state-dir", str(tmp_path / "places")) as run:

        def counted(requests: int, cuts: int) -> bool:
            page = Page(fetch(run.port))
            told = page("requests_total", outcome="ok"), page("log_lines_total"), page("log_truncations_total")
            return told == (requests, requests, cuts)

        write(0, 1000)
        eventually(lambda: counted(1000, 0))
        rotate()  # far below 64 MB: nothing is due
        assert log.read_text() == lines(0, 1000)
        rotate("--force")
        assert log.stat().st_size == 0
        write(1000, 1300)
        eventually(lambda: counted(1300, 1))
        rotate("--force")
        write(1300, 3300)  # more than was there
        eventually(lambda: counted(3300, 2))
        assert run.end()[0] == 0
    kept = [gzip.decompress(path.read_bytes()).decode() for path in sorted(tmp_path.glob("server.log.*.gz"))]
    assert kept == [lines(1000, 1300), lines(0, 1000)]
