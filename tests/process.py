"""``stopline run`` as a user starts it, and what it answers."""

import signal
import socket
import subprocess
import sys

from realengine import free_port, get, until


def assert_free(port: int) -> None:
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections may still be in TIME_WAIT
        again.bind(("127.0.0.1", port))
        again.listen()


def fetch(port: int, path: str = "/metrics") -> str:
    return get(f"http://127.0.0.1:{port}{path}")


def eventually(condition):
    return until(condition, 10, "what the test waits for")


class Process:
    """``stopline run`` as a user starts it; *options* are those of Popen, by default with its output kept.

    *python* is what the interpreter is given to run the command.
    """

    def __init__(self, *arguments: str, python: tuple[str, str] = ("-m", "exporter"), **options) -> None:
        self.port = free_port()
        command = [sys.executable, *python, "run", "--web.listen-address", f"127.0.0.1:{self.port}"]
        kept = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([*command, *arguments], **kept | options)

    def __enter__(self) -> "Process":
        try:
            until(lambda: fetch(self.port, "/-/healthy"), 30, "it answers")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=10)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=5)
        return self.process.returncode, errors
