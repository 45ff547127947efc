"""The wheel ships every file the product needs, data files too."""

import subprocess
import sys
import zipfile
from pathlib import Path

from exporter import __version__

ROOT = Path(__file__).parent.parent


def test_the_wheel_holds_the_whole_package(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"stopline_exporter-{__version__}-py3-none-any.whl"
    shipped = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("exporter/")}
    here = {str(p.relative_to(ROOT)) for p in (ROOT / "exporter").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert shipped == here
    assert "exporter/engines/vllm.yaml" in shipped
