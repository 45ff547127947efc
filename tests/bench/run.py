#!/usr/bin/env python3
"""What Stopline costs, beside what a user would take instead, in one run.

    make bench                       # table
    python tests/bench/run.py --json # the same as JSON; --markdown is what the README has

Machines are shared and noisy: figures are CPU time where they can be, the contestants alternate, and the median of the
rounds counts. Ratios can be compared between machines, seconds cannot.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

import log_path
import steady
import vllm_log
from rows import Row

ROUNDS = 3


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    for mix in (vllm_log.MIXED, vllm_log.SPARSE, vllm_log.DENSE):
        yield log_path.read(mix, arguments.megabytes, ROUNDS)
    yield log_path.backlog(arguments.backlog)
    yield from log_path.following(arguments.seconds)
    yield from steady.line_to_metric()
    yield steady.polling(ROUNDS)
    yield from steady.beside_a_server(arguments.steady)
    yield from steady.scrapes(arguments.scrapes)
    yield from steady.starts()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--megabytes", type=int, default=30, help="of each log that is read whole")
    parser.add_argument("--backlog", type=int, default=200, help="megabytes that are there at once")
    parser.add_argument("--seconds", type=float, default=15, help="for which a growing log is followed")
    parser.add_argument("--steady", type=float, default=60, help="seconds beside a server that does nothing unusual")
    parser.add_argument("--scrapes", type=int, default=200, help="of the page of 2,000 series")
    arguments = parser.parse_args()
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows(arguments)], indent=2))
        return
    form = "| {} | {} | {} | {} |" if arguments.markdown else "{:45} {:>20} {:>32} {:>7}"
    print(form.format("what", "Stopline", "instead", "ratio"))
    if arguments.markdown:
        print(form.format(*["---"] * 4))
    for row in rows(arguments):
        instead = "" if row.instead is None else f"{row.of}: {row.instead:.3g} {row.unit}"
        ratio = "" if row.ratio is None else f"{row.ratio:.1f} ×"
        print(form.format(row.what, f"{row.stopline:.3g} {row.unit}", instead, ratio), flush=True)


if __name__ == "__main__":
    main()
