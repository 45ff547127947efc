#!/usr/bin/env python3
"""One target under libFuzzer, which sees the branches that an input takes and looks for new ones.

    python tests/fuzz/guided.py TARGET FOLDER [flags of libFuzzer]

FOLDER gets the seeds, and keeps the inputs that led further.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["exporter", "targets", "yaml", "prometheus_client"]):
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from targets import targets


def main() -> None:
    name, folder, *flags = sys.argv[1:]
    (target,) = (target for target in targets() if target.name == name)
    for number, seed in enumerate(target.seeds):
        (Path(folder) / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], folder, *flags], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
