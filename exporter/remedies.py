"""Why something cannot be read, and what to do: the words of the README's tables, of our log and of the doctor.

Markdown, as the tables hold it; `plain` is for a log or a terminal.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

_LINK = re.compile(r"\[([^\]]+)\]\(#([^)]+)\)")


class Advice(NamedTuple):
    """What is the matter, and what to do about it."""

    cause: str
    remedy: str


HTTP = "http_…"
"""Stands for every HTTP status."""

PAGE = {
    "refused": Advice("nothing listens at `engine.url`", "normal while the server loads; else compare host and port"),
    "unreachable": Advice(
        "the host's name or route is wrong, or TLS failed",
        "the log and `stopline doctor` tell the detail; for TLS see `tls`",
    ),
    "tls": Advice("the engine's certificate is not trusted", "give its authority as `scrape.ca_file`"),
    "timeout": Advice(
        "no answer within `scrape.timeout`",
        "the engine's API process is overloaded; raise `scrape.interval` and with it the timeout",
    ),
    HTTP: Advice(
        "the server answers with this status in place of its page",
        "404 or 501: switch the engine's metrics on, see [flags](#engines); "
        "401 or 403: give `scrape.bearer_token_file` or `scrape.username`",
    ),
    "credentials": Advice("the token or password file cannot be read", "mount it, readable for Stopline's user"),
    "unhealthy": Advice(
        "the page answers, but `/health` says 5xx: the engine behind it is dead",
        "read the engine's log; restart it",
    ),
    "too_large": Advice("the page is larger than `scrape.max_bytes`", "raise it, if that is really the engine"),
    "broken": Advice("the connection was cut, or the answer is no HTTP", "look for a proxy between the two"),
    "not_metrics": Advice("the answer is no metrics page", "`engine.url` leads to something else"),
    "not_iterations": Advice(
        "the answer is no list of iterations", "switch them on in the engine (`enable_iter_perf_stats`)"
    ),
    "no_iterations": Advice(
        "`scrape.iterations` is on, and the engine tells none or is not recognised yet",
        "normal until it is; else leave the setting out",
    ),
    "not_recognised": Advice(
        "a metrics page, though not of a known engine, or not of the one that is set",
        "is this a gateway? set `engine.name`, or write a [profile](#add-an-engine)",
    ),
}
"""The engine's metrics page, and its records of iterations."""

LOG = {
    "missing": Advice(
        "there is no such file, or no file fits the pattern, or standard input was closed; with `kube://` no such "
        "container, or it has not started",
        "normal until the server writes; else compare the path with what the server writes to, "
        "as seen from Stopline's container; `kube://NAME` where the pod has several",
    ),
    "permission": Advice(
        "the file, or with `kube://` the pod's log, may not be read",
        "run with the group that owns it; in Kubernetes set `fsGroup`; for `kube://` bind a Role with `get` on "
        "`pods/log` to the pod's service account, and mount its token",
    ),
    "not_a_file": Advice(
        "the path is a directory, a pipe or a device",
        "give a file or a pattern such as `/var/log/engine/*.log`; a pipe goes to standard input with `--log -`",
    ),
    "io_error": Advice(
        "the file system failed, or with `kube://` the API server cannot be reached",
        "look at the kernel's log, or at network policies; reading is tried again",
    ),
}
"""The engine's log."""

GPU = {
    "library_not_found": Advice(
        "no NVIDIA driver library in sight",
        "let the container runtime inject it (`NVIDIA_DRIVER_CAPABILITIES=utility`); "
        "on a machine without GPUs say `--gpus none`",
    ),
    "driver_mismatch": Advice(
        "the driver was upgraded under the library that is loaded", "restart the container or pod"
    ),
    "driver_not_loaded": Advice(
        "the kernel module is not loaded, or `/dev/nvidiactl` is not in the container",
        "load it; give the container the device",
    ),
    "no_permission": Advice(
        "the device may not be opened", "give the container the `/dev/nvidia*` nodes, readable for its user"
    ),
    "gpu_lost": Advice(
        "a GPU fell off the bus or wants a reset",
        "look for Xid in the kernel's log; reset the GPU or reboot the node",
    ),
    "timeout": Advice("the driver does not answer", "look for Xid and hung tasks in the kernel's log"),
    "no_devices": Advice("no GPU fits `gpus.devices`", "compare it with `nvidia-smi -L` in this container"),
    "unknown": Advice(
        "NVML says something else", "run `nvidia-smi` in this container; the log and `stopline doctor` tell the detail"
    ),
}
"""The GPUs."""

SERVICE = {
    "refused": Advice("nothing listens there", "compare host and port; is it started?"),
    "unreachable": Advice(
        "the host's name or route is wrong, or TLS failed", "look from this container; for TLS see `tls`"
    ),
    "tls": Advice("its certificate is not trusted", "give its authority in the variable `SSL_CERT_FILE`"),
    "timeout": Advice("no answer within five seconds", "look at its own log and load"),
    HTTP: Advice(
        "it answers with this status",
        "401 or 403: give `--prometheus-token-file` or `--grafana-token-file`; "
        "404: give the address as people open it, with the path that a proxy puts before it",
    ),
    "credentials": Advice("the token file cannot be read", "mount it, readable for Stopline's user"),
    "too_large": Advice("the answer is larger than 64 MiB", "ask a Prometheus that holds less"),
    "broken": Advice("the connection was cut, or the answer is no HTTP", "look for a proxy between the two"),
    "not_its_api": Advice(
        "the answer is not that of its API: a login page, or another program",
        "give the address of Prometheus or Grafana itself, and a token where a proxy asks for one",
    ),
}
"""Prometheus and Grafana, as `stopline doctor` asks them."""

MODEL_UNKNOWN = Advice("neither page nor log has told the name yet, or this engine never does", "set `engine.model`")
METRIC_MISSING = Advice(
    "this version of the engine has no such metric, or a flag is off",
    "see [flags](#engines); compare the version with the table",
)
UNPARSED = Advice(
    "lines look like known ones but read differently: a new version of the engine, or an own pattern with a mistake",
    "`stopline explain FILE` shows them; compare them with the samples in the profile",
)
UNMATCHED = Advice(
    "the engine was not recognised, or its level hides these lines",
    "set `engine.name`; start the engine at level INFO",
)
"""Rows of the table of symptoms that the doctor, too, can see."""


def of(reasons: Mapping[str, Advice], reason: str) -> Advice:
    """What one of the tables says of *reason*."""
    return reasons[HTTP if reason.startswith("http_") else reason]


def plain(text: str) -> str:
    """Markdown as a terminal shows it: a link is its text and where in the README it leads."""
    return _LINK.sub(lambda link: f"{link[1]} (README: {link[2].replace('-', ' ')})", text).replace("`", "")
