"""deploy/compose: what its files name exists, and what checks them accepts them; run it is by `make test-image`."""

import re
import shutil
import subprocess

import pytest
import yaml
from manifests import DEPLOY

from exporter import __version__, config

COMPOSE = DEPLOY / "compose"


def services() -> dict:
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]


def test_the_settings_are_sound() -> None:
    assert config.load(COMPOSE / "stopline.yml").gpus.devices == "none"


def test_the_file_is_what_the_specification_allows_and_a_slip_is_found() -> None:
    specification = pytest.importorskip("compose_spec", reason="built for amd64 alone").PyCompose
    text = (COMPOSE / "compose.yaml").read_text()
    specification.from_yaml(text).validate()
    with pytest.raises(ValueError, match="cap_dropp"):
        specification.from_yaml(text.replace("cap_drop", "cap_dropp"))


def test_every_file_that_is_mounted_exists_and_every_volume_is_declared() -> None:
    declared = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["volumes"]
    for name, service in services().items():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            known = (COMPOSE / source).exists() if source.startswith(".") else source in declared
            assert known, (name, mount)


def test_the_services_know_each_other_and_are_reached_from_this_machine_alone() -> None:
    known = services()
    engine = config.load(COMPOSE / "stopline.yml").engine.url
    assert re.fullmatch(r"http://(\w+):(\d+)", engine)[1] in known
    assert engine.rpartition(":")[2] in known["engine"]["command"]
    for text in ("prometheus.yml", "alertmanager.yml"):
        targets = re.findall(r"targets: \['(\w+):", (COMPOSE / text).read_text())
        assert set(targets) <= set(known)
    assert all(port.startswith("127.0.0.1:") for service in known.values() for port in service["ports"])
    assert known["stopline"]["image"] == f"stopline:{__version__}"
    assert known["stopline"]["read_only"]
    assert known["stopline"]["cap_drop"] == ["ALL"]


def test_prometheus_and_alertmanager_take_their_files(tmp_path) -> None:
    text = (COMPOSE / "prometheus.yml").read_text().replace("/etc/prometheus/rules", str(tmp_path))
    (tmp_path / "prometheus.yml").write_text(text)
    commands = [["promtool", "check", "config", tmp_path / "prometheus.yml"]]
    if shutil.which("amtool"):
        commands.append(["amtool", "check-config", COMPOSE / "alertmanager.yml"])
    for command in commands:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
