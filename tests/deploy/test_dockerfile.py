"""The Dockerfile as hadolint sees it, and what no linter asks; built and run it is by `make test-image`."""

import re
import subprocess
import sys
from pathlib import Path

from manifests import ROOT

from exporter import __version__

TEXT = (ROOT / "Dockerfile").read_text()


def test_hadolint_has_nothing_to_say() -> None:
    result = subprocess.run(
        [Path(sys.executable).parent / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "")


def test_it_runs_without_a_shell_as_a_user_that_a_cluster_can_tell_is_not_root() -> None:
    last = TEXT[TEXT.rindex("\nFROM ") :]
    assert "\nRUN " not in last
    assert re.search(r"(?m)^USER \d+:\d+$", last)
    for instruction in ("ENTRYPOINT", "CMD"):
        assert re.search(rf"(?m)^{instruction} \[", last)
    assert re.search(r"HEALTHCHECK .*CMD \[", last)
    assert f"ARG VERSION={__version__}\n" in last


def test_only_what_the_wheel_is_made_of_reaches_the_build() -> None:
    ignore = (ROOT / ".dockerignore").read_text().split()
    assert ignore[0] == "*"
    copied = set(re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", TEXT))
    assert {name for names in copied for name in names.split()} == {line[1:] for line in ignore if line.startswith("!")}
