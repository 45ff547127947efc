"""Which GPUs are watched: those the setting names, or those the engine's process may use.

The setting is ``auto``, ``all``, or names: an index (``0``; with MIG all instances of that GPU), an
instance (``0.1`` or ``0:1``), or a uuid, whole or as a prefix that fits one device only (``GPU-b``,
``MIG-…``; the uuid of a GPU split by MIG stands for all its instances).

``auto`` takes the visible devices of the engine's processes, as their environment had them at their
start. Such a process is one whose program (or Python module or script) is named after an engine, and
which carries ``CUDA_VISIBLE_DEVICES`` or ``NVIDIA_VISIBLE_DEVICES``. It can be seen where the process
namespace is shared, user and group are the same, and it has no capability that we lack (ptrace(2), access
mode checking); what may not be read is passed over. Without one, our own environment decides; without the
variables, everything that NVML shows.

What the variables mean:

- ``NVIDIA_VISIBLE_DEVICES`` told the container toolkit what to put into a container: ``none`` no GPU,
  ``all`` every GPU. ``void``, the empty value and no value leave the container to others (a device plugin
  through CDI, say), so they exclude nothing. Its indices are the host's.
- ``CUDA_VISIBLE_DEVICES`` narrows that for one process: the empty value is no GPU, and the list ends
  before its first entry that is no device. Its indices count the GPUs of the container in CUDA's order,
  taken here to be PCI bus order, which is NVML's. With ``CUDA_DEVICE_ORDER`` unset CUDA sorts unlike GPUs
  by speed instead; on such a host name them by uuid. Where a GPU is split, an index stands for its first
  instance, the one that CUDA would use.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from exporter.sources.nvml import Device

CUDA = "CUDA_VISIBLE_DEVICES"
NVIDIA = "NVIDIA_VISIBLE_DEVICES"
ENGINES = re.compile("vllm|sglang|llama|text.generation|trtllm|tritonserver|lmdeploy|dynamo|deepinfer", re.IGNORECASE)
Environ = Mapping[str, str]
Choice = tuple[list[Device], list[str]]
"""Devices in NVML's order, and the names that fit none of them."""

_INTERPRETER = re.compile(r"python[\d.]*")


def parse(setting: str | Iterable[str | int]) -> tuple[str, ...]:
    """The setting as names: a list, or a string with commas. Raises ValueError if it names nothing."""
    names = setting.split(",") if isinstance(setting, str) else [str(name) for name in setting]
    names = [name.strip() for name in names if name.strip()]
    if not names or "none" in names:
        raise ValueError(f"no GPU is wanted ({setting!r}): build no GPU source")
    if len(names) > 1 and {"auto", "all"} & {*names}:
        raise ValueError(f"'auto' and 'all' stand alone, got {setting!r}")
    return tuple(names)


def choose(names: Sequence[str], devices: Sequence[Device], engines: Sequence[Environ], own: Environ) -> Choice:
    """Of *devices* those to watch. *engines* are environments of the engine's processes, *own* is ours."""
    if tuple(names) == ("all",):
        return list(devices), []
    if tuple(names) != ("auto",):
        return pick(names, devices)
    if engines:
        return _used(engines, devices)
    chosen, missing = seen_by(own, devices)
    if missing:  # the runtime has applied the list to this container already, and numbered what is left anew
        return list(devices), []
    return chosen, []


def pick(names: Sequence[str], devices: Sequence[Device]) -> Choice:
    """The devices that *names* name; a prefix that fits several counts as missing."""
    found = {name: _named(name, devices) for name in names}
    wanted = {id(device) for fits in found.values() for device in fits}
    return [d for d in devices if id(d) in wanted], [name for name, fits in found.items() if not fits]


def seen_by(environ: Environ, devices: Sequence[Device]) -> Choice:
    """The devices that a CUDA process with this environment may use."""
    given, missing = _given(environ.get(NVIDIA, ""), devices)
    value = environ.get(CUDA)
    if value is None:
        return given, missing
    gpus = list(dict.fromkeys(d.gpu.partition(".")[0] for d in given))
    names: list[str] = []
    for entry in (e.strip() for e in value.split(",")):
        if entry.isdecimal() and int(entry) < len(gpus):
            names.append(next(d.gpu for d in given if d.gpu.partition(".")[0] == gpus[int(entry)]))
        elif not entry.isdecimal() and _named(entry, given):
            names.append(entry)
        else:
            if entry not in ("", "-1", "NoDevFiles"):  # the usual ways to say that there is none
                missing = [*missing, entry]
            break
    return pick(names, given)[0], missing


def find_engines(proc: Path = Path("/proc")) -> list[Environ]:
    """The distinct visible-device settings of the engine's processes; blocks while it reads *proc*."""
    found: dict[tuple[tuple[str, str], ...], Environ] = {}
    for entry in proc.glob("[0-9]*"):
        try:
            if entry.name == str(os.getpid()) or not _is_engine((entry / "cmdline").read_bytes()):
                continue
            pairs = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # gone meanwhile, or another user's
            continue
        environ = {k: v for k, _, v in (p.partition("=") for p in pairs) if k in (CUDA, NVIDIA)}
        if environ:
            found[tuple(sorted(environ.items()))] = environ
    return list(found.values())


def _used(engines: Sequence[Environ], devices: Sequence[Device]) -> Choice:
    """The devices of all processes of an engine together.

    Ranks may have one GPU each. Where some carry the narrower variable, a launcher that does not is left out;
    yet helpers told to use no GPU at all do not narrow anything.
    """
    for narrow in (True, False):
        seen = [seen_by(environ, devices) for environ in engines if (CUDA in environ) is narrow]
        wanted = {id(device) for chosen, _ in seen for device in chosen}
        missing = list(dict.fromkeys(name for _, names in seen for name in names))
        if wanted or missing:
            return [d for d in devices if id(d) in wanted], missing
    return [], []


def _given(value: str, devices: Sequence[Device]) -> Choice:
    """What the container toolkit puts into a container for this value of NVIDIA_VISIBLE_DEVICES."""
    parts = (part.strip().rpartition("=")[2] for part in value.split(","))  # CDI writes vendor/class=name
    names = [part for part in parts if part]
    if names in ([], ["void"]) or "all" in names:
        return list(devices), []
    if names == ["none"]:
        return [], []
    gpus = {d.gpu.partition(".")[0] for d in devices}
    if all(name.isdecimal() for name in names) and len(set(names)) == len(gpus):
        return list(devices), []  # as many as are here: the same ones, if by other numbers
    return pick(names, devices)


def _named(name: str, devices: Sequence[Device]) -> list[Device]:
    name = name.strip().lower()
    gpu = name.replace(":", ".")
    if by_index := [d for d in devices if gpu in (d.gpu, d.gpu.partition(".")[0])]:
        return by_index
    if not name.startswith(("gpu-", "mig-")):
        return []
    for key in ("uuid", "parent"):
        uuids = {uuid for d in devices if (uuid := getattr(d, key).lower()).startswith(name)}
        if name in uuids or len(uuids) == 1:
            uuid = name if name in uuids else uuids.pop()
            return [d for d in devices if getattr(d, key).lower() == uuid]
    return []


def _is_engine(cmdline: bytes) -> bool:
    """Whether the program, or the module or script that Python was given, is named after an engine."""
    argv = [a for a in cmdline.decode(errors="replace").split("\0") if a]
    if not argv:
        return False
    program = _name(argv[0])
    if _INTERPRETER.fullmatch(program):
        rest = argv[1:]
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            del rest[: 2 if rest[0] in ("-W", "-X") else 1]
        if rest[:1] == ["-m"]:
            del rest[0]
        program = _name(rest[0]) if rest else ""
    return bool(ENGINES.search(program))


def _name(path: str) -> str:
    return path.rpartition("/")[2]
