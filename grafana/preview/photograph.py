#!/usr/bin/env python3
"""Photographs every board in quiet times and in each incident, from a fleet on the simulator.

    photograph.py                  # all of them into .cache/boards/
    photograph.py why latency      # those whose names hold one of these words
    photograph.py --replay         # play the fleet afresh: some minutes
    photograph.py --keep           # those of the README again, small, into grafana/pictures/

What is played once is kept in .cache/boards/story.om.
"""

import argparse
import http.server
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/bench")]

import fleet  # noqa: E402  the tests' modules are found from here on

CACHE = ROOT / ".cache/boards"
PICTURES = ROOT / "grafana/pictures"
KEPT = {"lines-latency": 1150, "why-latency": 1110, "headroom-memory": 1950, "capacity-layouts": 920}
"""Of the README, with the height that is shown there."""
BOARDS = ("lines", "headroom", "why", "capacity")
WIDTH = 1400
HEIGHTS = {"lines": 2862, "headroom": 2340, "why": 2442, "capacity": 1650}
SHOWN = 3600.0
"""Seconds; the capacity board shows six times as many."""
MOMENTS = {  # what is chosen, and seconds from the beginning of the incidents
    "quiet": ({"pod": "hy3-0"}, -30.0),
    "latency": ({"pod": "hy3-latency"}, fleet.LASTS - 30),
    "queue": ({"pod": "queue-0"}, fleet.LASTS - 30),
    "errors": ({"pod": "hy3-errors"}, fleet.LASTS - 30),
    "memory": ({"pod": "hy3-memory"}, fleet.LASTS - 30),
    "cache": ({"pod": "cache-0"}, fleet.LASTS - 30),
    "communication": ({"pod": "ring-0"}, fleet.LASTS - 30),
    "fleet": ({}, fleet.LASTS - 30),
    "layouts": ({"model": "hy3-fp8"}, fleet.LASTS - 30),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only pictures whose name holds one of these")
    parser.add_argument("--keep", action="store_true", help="the pictures of the README")
    parser.add_argument("--replay", action="store_true", help="play the fleet afresh")
    given = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(exist_ok=True)
    kept = CACHE / "story.om"
    if given.replay or not kept.exists():
        with tempfile.TemporaryDirectory() as directory:
            story = fleet.play(1.0, Path(directory))
        with kept.open("w") as file:
            file.writelines(story.openmetrics())
    with tempfile.TemporaryDirectory() as directory, _prometheus(kept, Path(directory)) as prometheus, _site() as site:
        for name, url, height in _pictures(prometheus):
            if given.keep and name in KEPT:
                _photograph(f"{site}/?{url}", PICTURES / f"{name}.png", KEPT[name])
                _shrink(PICTURES / f"{name}.png")
            elif not given.keep and (not given.words or any(word in name for word in given.words)):
                _photograph(f"{site}/?{url}", CACHE / f"{name}.png", height)
                print(f".cache/boards/{name}.png")


def _prometheus(kept: Path, directory: Path):  # type: ignore[no-untyped-def]
    class Kept(fleet.Story):
        def openmetrics(self) -> Iterator[str]:
            with kept.open() as file:
                yield from file

    return fleet.prometheus(Kept(1.0, [], {}), directory)


def _pictures(prometheus: str) -> Iterator[tuple[str, str, int]]:
    for moment, (chosen, after) in MOMENTS.items():
        end = fleet.BEGAN + fleet.CALM + after
        for board in BOARDS:
            shown = 6 * SHOWN if board == "capacity" else SHOWN
            begin = max(fleet.BEGAN, end - shown)
            parameters = {"board": f"stopline-{board}", "prometheus": prometheus, "from": begin, "to": end}
            parameters |= {f"var-{name}": value for name, value in chosen.items()}
            yield f"{board}-{moment}", urllib.parse.urlencode(parameters), HEIGHTS[board]


class _Files(http.server.SimpleHTTPRequestHandler):
    """The page, the script that `npm run build` made of it, and the committed boards."""

    def translate_path(self, path: str) -> str:
        inner = urllib.parse.urlparse(path).path.lstrip("/")
        if inner.startswith("dashboards/"):
            return str(ROOT / "grafana" / inner)
        return str(HERE / ".build" / inner if inner else HERE / "index.html")

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def _site() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def _photograph(url: str, picture: Path, height: int) -> None:
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                "chromium",
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--window-size={WIDTH},{height}",
                "--virtual-time-budget=20000",
                f"--screenshot={picture}",
                url,
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )


def _shrink(picture: Path) -> None:
    subprocess.run(["pngquant", "--force", "--ext=.png", "--speed=1", "64", picture], check=True)


if __name__ == "__main__":
    main()
