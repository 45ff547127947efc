"""A server that prints and answers as a llama.cpp does: what stands in for it in the pod."""

import http.server
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = Path("/models/metrics.txt").read_bytes() if self.path == "/metrics" else b"{}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def stop(*_: object) -> None:
    os.write(1, b"last words\n")  # print may be what was interrupted, and does not allow a second one in it
    sys.exit(7)


signal.signal(signal.SIGTERM, stop)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8080), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
for n in itertools.count():
    print(f"line {n} of the engine", flush=True)
    time.sleep(0.05)
