#!/usr/bin/env python3
"""Fuzz everything that reads what others wrote, for as long as you like.

    make fuzz                                          # a minute for each target
    python tests/fuzz/campaign.py --seconds 600 --only lines page

Mutated captures first, as many as the time allows; then libFuzzer for the same time, where the extra `fuzz` (atheris)
is installed. An input that raises, or of a stranger's takes more than 100 ms of processor time, is kept in FOLDER and told; then it
ends with 1.
"""

import argparse
import hashlib
import importlib.util
import re
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent.parent))
from mutate import mutated
from targets import Target, targets


@dataclass
class Tally:
    """What came of one target. *slowest* is the most processor seconds that one input took."""

    inputs: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    found: list[tuple[str, bytes]] = field(default_factory=list)
    """What went wrong, and with which input."""

    def add(self, target: Target, data: bytes) -> None:
        """Run *target* on *data*, and where that was slow once more: something else may have been in its way."""
        took = self._run(target, data)
        if took > target.slow:
            took = min(took, self._run(target, data))
            if took > target.slow:
                self.found.append((f"{took:.3f} s for {len(data)} bytes", data))
        self.inputs += 1
        self.slowest = max(self.slowest, took)

    def _run(self, target: Target, data: bytes) -> float:
        """Processor seconds."""
        began = time.process_time()
        try:
            target.run(data)
        except Exception:
            self.found.append((traceback.format_exc(limit=-4), data))
        return time.process_time() - began


def mutations(target: Target, *, inputs: int | None = None, seconds: float = float("inf"), seed: int = 1) -> Tally:
    """So many inputs, or as many as fit in the time; stops at the tenth that is found."""
    random, tally, began = Random(seed), Tally(), time.monotonic()
    while len(tally.found) < 10 and (inputs is None or tally.inputs < inputs):
        if tally.inputs % 100 == 0 and time.monotonic() - began > seconds:
            break
        tally.add(target, mutated(random, target.seeds))
    tally.seconds = time.monotonic() - began
    return tally


def guided(target: Target, folder: Path, seconds: float) -> Tally:
    """What libFuzzer finds within so many seconds."""
    corpus = folder / f"corpus-{target.name.replace(' ', '-')}"
    corpus.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, Path(__file__).with_name("guided.py"), target.name, corpus]
    flags = [
        f"-max_total_time={seconds:g}",
        "-max_len=65536",
        "-timeout=5",
        "-print_final_stats=1",
        f"-artifact_prefix={folder}/",
    ]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, errors="replace", check=False)
    told = re.search(r"Done (\d+) runs in (\d+) second", done.stderr)
    tally = Tally(int(told[1]), float(told[2])) if told else Tally()
    if done.returncode:
        tally.found.append((done.stderr[-4000:], b""))
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="for each target and way")
    parser.add_argument("--only", nargs="+", choices=[target.name for target in targets()], help="these targets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(".cache/fuzz"))
    arguments = parser.parse_args()
    ways = ["mutated", *(["guided"] if importlib.util.find_spec("atheris") else [])]
    total = wrong = 0
    print(f"{'target':12} {'inputs':>10} {'a second':>9} {'slowest':>9}  found")
    for target in targets():
        if arguments.only and target.name not in arguments.only:
            continue
        for way in ways:
            if way == "mutated":
                tally = mutations(target, seconds=arguments.seconds, seed=arguments.seed)
            else:
                tally = guided(target, arguments.folder, arguments.seconds)
            total, wrong = total + tally.inputs, wrong + len(tally.found)
            rate = tally.inputs / max(tally.seconds, 1e-9)
            slowest = f"{1000 * tally.slowest:.1f} ms" if way == "mutated" else way
            print(f"{target.name:12} {tally.inputs:10,} {rate:9,.0f} {slowest:>9}  {len(tally.found)}", flush=True)
            for what, data in tally.found:
                print(what, file=sys.stderr)
                if data:
                    arguments.folder.mkdir(parents=True, exist_ok=True)
                    kept = arguments.folder / f"{target.name.replace(' ', '-')}-{hashlib.sha256(data).hexdigest()[:12]}"
                    kept.write_bytes(data)
                    print(f"kept: {kept}", file=sys.stderr)
    print(f"{total:,} inputs, {wrong} found")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
