"""Headless Chromium, for tests: a page as the browser has it in the end, and what its console says."""

import asyncio
import shutil
from pathlib import Path

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update"),
    *("--disable-background-networking", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=8000"),
)


async def browse(url: str, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """The page after eight seconds of the browser's own time, and the lines of its console."""
    browser = shutil.which("chromium")
    assert browser, "chromium is missing: make packages"
    process = await asyncio.create_subprocess_exec(
        *(browser, *FLAGS, *flags, f"--user-data-dir={profile}", "--dump-dom", url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        dom, log = await asyncio.wait_for(process.communicate(), 60)
    except TimeoutError:
        process.kill()
        raise
    return dom.decode(), [line for line in log.decode().splitlines() if "CONSOLE" in line]
