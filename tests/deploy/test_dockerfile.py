"""The Dockerfile as hadolint sees it, and what no linter asks; built and run it is by `make test-image`."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from manifests import ROOT

from exporter import __version__

TEXT = (ROOT / "Dockerfile").read_text()
GLIBC = ("manylinux_2_17", "manylinux2014", "manylinux_2_28", "manylinux_2_34")
"""Tags of wheels that run on Debian 13."""


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


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_every_package_of_the_image_has_a_wheel_for_this_architecture(architecture: str, tmp_path: Path) -> None:
    """The build takes nothing but wheels, for it has no compiler."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["traces"]]
    python = re.search(r"python:(\d\.\d+)-slim", TEXT)
    assert python
    assert "--only-binary :all:" in TEXT
    options = ["--dry-run", "--ignore-installed", "--only-binary=:all:", f"--target={tmp_path}", "--implementation=cp"]
    options += [f"--python-version={python[1]}", *(f"--platform={tag}_{architecture}" for tag in GLIBC)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--report=-"]
    result = subprocess.run([*pip, *options, *wanted], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    wheels = [package["download_info"]["url"].rpartition("/")[2] for package in json.loads(result.stdout)["install"]]
    native = [name for name in wheels if not name.endswith("-none-any.whl")]
    assert {name.partition("-")[0] for name in native} >= {"ahocorasick_rs", "aiohttp", "bcrypt", "msgspec"}
    assert all(name.endswith(f"_{architecture}.whl") for name in native), native
