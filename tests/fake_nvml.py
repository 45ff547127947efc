"""NVML without a GPU: the stand-in library of tests/nvml/fake_nvml.c, built once and driven by the real pynvml.

A test module asks for it by ``pytest_plugins = ("fake_nvml",)`` and then has these fixtures:

- ``nvml_library``: path of the built ``libnvidia-ml.so.1``; a process started with its folder in
  ``LD_LIBRARY_PATH`` and with ``hardware.env`` finds it as it would find the real one.
- ``hardware``: the state of the machine the library plays.
- ``nvml_here``: loads the library in this process, where pynvml is told to use it.
"""

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "nvml" / "fake_nvml.c"
CC = "gcc -shared -fPIC -O1 -Wall -Wextra -Wl,-soname,libnvidia-ml.so.1"


class Hardware:
    """GPUs as a table of the keys that fake_nvml.c documents; a change holds from the next call on.

    FUNCTION in a key is the C name: ``{"gpu0.err": "GPU_IS_LOST", "gpu5.delay_ms.nvmlDeviceGetMemoryInfo_v2": 60000}``.
    """

    def __init__(self, folder: Path) -> None:
        self.state = folder / "nvml.state"
        self.trace = folder / "nvml.trace"
        self.env = {"FAKE_NVML_STATE": str(self.state), "FAKE_NVML_TRACE": str(self.trace)}
        self._keys: dict[str, object] = {}
        self.set({})

    def set(self, keys: dict[str, object]) -> None:
        """Change what the *keys* name, and nothing else."""
        self._keys |= keys
        self._write()

    def clear(self, *keys: str) -> None:
        """Take *keys* back to their defaults."""
        for key in keys:
            del self._keys[key]
        self._write()

    def calls(self) -> list[str]:
        """The C functions called so far, oldest first, and forget them."""
        lines = self.trace.read_text().splitlines() if self.trace.exists() else []
        self.trace.unlink(missing_ok=True)
        return [line.split()[1] for line in lines]

    def _write(self) -> None:
        new = self.state.with_suffix(".new")
        lines = "".join(f"{key}={value}\n" for key, value in self._keys.items())
        new.write_text(lines, errors="surrogateescape")  # "\udcff" is the byte 0xff
        new.replace(self.state)  # at once: the library reads it at every call


def build(folder: Path) -> Path:
    """The library, built into *folder*. Raises CalledProcessError where it does not compile."""
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([*CC.split(), "-o", library, SOURCE], check=True)
    return library


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def hardware(tmp_path, monkeypatch) -> Hardware:
    hardware = Hardware(tmp_path)
    for name, value in hardware.env.items():
        monkeypatch.setenv(name, value)  # os.environ reaches the C getenv
    return hardware


@pytest.fixture
def nvml_here(nvml_library, hardware, monkeypatch) -> Hardware:
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(os.fspath(nvml_library)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return hardware
