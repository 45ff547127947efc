#!/usr/bin/env python3
"""Photographs the live page in quiet times and in each incident, in both themes, wide and on a phone.

    photograph.py              # all of them into .cache/pages/
    photograph.py phone dark   # those whose names hold one of these words
    photograph.py --keep       # those of the README again, into this folder

What it shows is a server on the simulator, an hour and more after its start, in time ten times shortened.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import FLAGS  # noqa: E402  the tests' modules are found from here on
from incidents import SHORTER  # noqa: E402
from scenarios import SCENARIOS  # noqa: E402

from exporter.live import page  # noqa: E402
from exporter.live.state import State  # noqa: E402

CACHE = ROOT / ".cache/pages"
PLAYED = {
    "quiet": "healthy-learned",
    "latency": "overload-learned",
    "errors": "engine-dead-learned",
    "memory": "leak",
}
SIZES = {"wide": (1300, 1560), "phone": (390, 3900)}
KEPT = {"latency-light-wide": ("page-latency", 880), "memory-dark-wide": ("page-memory-dark", 880)}
"""Of the README, with the height that is shown there."""
_DARK = "(prefers-color-scheme: dark)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only pictures whose name holds one of these")
    parser.add_argument("--keep", action="store_true", help="the pictures of the README")
    given = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    for moment, scenario in PLAYED.items():
        names = [f"{moment}-{theme}-{size}" for theme in ("light", "dark") for size in SIZES]
        chosen = [name for name in names if not given.words or any(word in name for word in given.words)]
        wanted = [name for name in names if name in KEPT] if given.keep else chosen
        if not wanted:
            continue
        text = page.render(_state(scenario)).replace(page._JS, "")  # it would find that nobody answers
        for name in wanted:
            _, theme, size = name.split("-")
            width, height = SIZES[size]
            target, tall = (
                (HERE / f"{KEPT[name][0]}.png", KEPT[name][1]) if given.keep else (CACHE / f"{name}.png", height)
            )
            _photograph(text.replace(_DARK, "all" if theme == "dark" else "not all"), target, width, tall)
            if given.keep:
                subprocess.run(["pngquant", "--force", "--ext=.png", "--speed=1", "64", target], check=True)
            print(target.relative_to(ROOT))


def _state(name: str) -> State:
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.name == name)
    options = {"engine": scenario.engine | {"model": "hy3"}, "replica": scenario.replica | {"pace": SHORTER}}
    return replace(scenario, **options).play().replica.sidecar.live.state()


def _photograph(text: str, picture: Path, width: int, height: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "page.html"
        file.write_text(text)
        flags = [*FLAGS, "--hide-scrollbars", f"--user-data-dir={directory}/profile", f"--window-size={width},{height}"]
        command = ["chromium", *flags, f"--screenshot={picture}", file.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
