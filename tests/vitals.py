"""What a process takes of its machine, from /proc: memory, descriptors, threads, processor time."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Vitals:
    """A process at one moment; *at* is monotonic seconds, *cpu_seconds* are those of user and system together."""

    at: float
    resident_bytes: int
    descriptors: int
    threads: int
    cpu_seconds: float

    @classmethod
    def of(cls, pid: int) -> "Vitals":
        """Of the process *pid* now. Raises FileNotFoundError if there is none."""
        proc = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
        return cls(
            time.monotonic(),
            int(status["VmRSS"].split()[0]) * 1024,
            len(list((proc / "fd").iterdir())),
            int(status["Threads"]),
            (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND,
        )
