"""A large vLLM page that counts on from poll to poll, and a server of it."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CAPTURED = Path(__file__).parent.parent / "fixtures/vllm/0.32.0-hy3/metrics-queueing.txt"
_ENGINE = 'engine="0"'
_COUNTED = re.compile(r"(?m)^(\w[\w:]*(?:_total|_bucket|_count|_sum)(?:\{.*\})? )(\S+)$")


def of_engines(ranks: int) -> str:
    """The captured page as so many data-parallel ranks would give it."""
    lines = []
    for line in CAPTURED.read_text().splitlines(keepends=True):
        lines.append(line)
        if _ENGINE in line:
            lines += (line.replace(_ENGINE, f'engine="{rank}"') for rank in range(1, ranks))
    return "".join(lines)


def later(page: str, polls: int) -> str:
    """*page* after so many polls more: between two of them one request came, and took next to no time."""

    def grown(match: re.Match[str]) -> str:
        each = 0.0001 if "_sum" in match[1] else 1.0
        return (
            f"{match[1]}{float(match[2]) + polls * each:g}"
            if "_sum" in match[1]
            else f"{match[1]}{float(match[2]) + polls}"
        )

    return _COUNTED.sub(grown, page)


@contextmanager
def served(pages: list[str]) -> Iterator[str]:
    """*pages* one after the other, over and over, at the address that is given; /health says that all is well."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        turn = 0

        def do_GET(self) -> None:
            body = b""
            if self.path == "/metrics":
                body = pages[Handler.turn % len(pages)].encode()
                Handler.turn += 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
