"""confined.py UNIT COMMAND...: COMMAND behind the filter of system calls that systemd would make of UNIT.

Of the unit SystemCallFilter and RestrictAddressFamilies hold: another call, or another family of sockets, is refused
with EPERM. The filter is made as systemd makes it, by libseccomp and from its own list of sets. The caller has given up
privileges (no_new_privs) before.
"""

import ctypes
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # SCMP_ACT_ALLOW, SCMP_ACT_ERRNO(EPERM); seccomp.h of libseccomp
EQUAL = 4  # SCMP_CMP_EQ
UNKNOWN = -1  # __NR_SCMP_ERROR: this libseccomp has no such call


class Comparison(ctypes.Structure):
    """``struct scmp_arg_cmp``."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def setting(unit: str, name: str) -> str:
    """What *unit* says for *name*, last line first."""
    return re.findall(rf"(?m)^{name}=(.*)$", unit)[-1]


def calls(names: list[str]) -> set[str]:
    """The system calls in the sets *names*, and those that systemd always allows."""
    listed = subprocess.run(["systemd-analyze", "syscall-filter"], capture_output=True, text=True, check=True).stdout
    sets = {block.split()[0]: re.findall(r"(?m)^ {4}(@?\w[\w-]*)$", block) for block in listed.split("\n\n") if block}
    found, wanted = set(), ["@default", *names]
    while wanted:
        name = wanted.pop()
        if name.startswith("@"):
            wanted += sets[name]
        else:
            found.add(name)
    return found


def confine(unit: str) -> None:
    """From here on, in this process and all that it becomes. Raises OSError if the kernel takes no filter."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(REFUSE))

    def allow(name: str, *comparisons: Comparison) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number != UNKNOWN:
            array = (Comparison * len(comparisons))(*comparisons)
            library.seccomp_rule_add_array(context, ALLOW, number, len(comparisons), array)

    for name in calls(setting(unit, "SystemCallFilter").split()) - {"socket"}:
        allow(name)
    for family in setting(unit, "RestrictAddressFamilies").split():
        allow("socket", Comparison(0, EQUAL, getattr(socket, family), 0))
    if error := library.seccomp_load(context):
        raise OSError(-error, os.strerror(-error))


if __name__ == "__main__":
    confine(Path(sys.argv[1]).read_text())
    os.execvp(sys.argv[2], sys.argv[2:])
