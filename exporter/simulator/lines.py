"""The shape of vLLM's log lines: who, level, when, where, what.

    (EngineCore pid=956) INFO 11-30 07:26:26 [core.py:402] init engine (...) took 0.76 s

The time has neither year nor zone, and every physical line of a message repeats the prefix.  uvicorn's lines
and what C++ libraries print have none; here those are lines without a process.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

from .config import EngineConfig

API = "APIServer"
CORE = "EngineCore"
API_PID, CORE_PID, FIRST_WORKER_PID = 914, 956, 997


class Line(NamedTuple):
    process: str  # "" for a bare line
    level: str
    where: str
    text: str


def bare(text: str) -> Line:
    return Line("", "", "", text)


def api(where: str, text: str, level: str = "INFO") -> Line:
    return Line(API, level, where, text)


def core(where: str, text: str, level: str = "INFO") -> Line:
    return Line(CORE, level, where, text)


def workers(config: EngineConfig) -> list[str]:
    """The processes that hold the GPUs, by rank; with one GPU that is the core itself."""
    if config.gpus == 1:
        return [CORE]
    return [f"Worker_TP{rank}" + (f"_EP{rank}" if config.split_experts else "") for rank in range(config.gpus)]


def pids(config: EngineConfig) -> dict[str, int]:
    """Made up, and the same after each start."""
    ranks = {worker: FIRST_WORKER_PID + rank for rank, worker in enumerate(workers(config))}
    return ranks | {API: API_PID, CORE: CORE_PID}


def physical(line: Line, seconds_since_epoch: float, pids: dict[str, int]) -> Iterator[str]:
    """*line* as it stands in the file, without newlines."""
    prefix = ""
    if line.process:
        stamp = time.strftime("%m-%d %H:%M:%S", time.localtime(seconds_since_epoch))
        prefix = f"({line.process} pid={pids[line.process]}) {line.level} {stamp} [{line.where}] "
    for text in line.text.split("\n"):
        yield prefix + text
