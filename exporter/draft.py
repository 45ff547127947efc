"""A first mapping for the log of a server Stopline does not know, from the fields it finds there."""

import re
from collections import Counter

_FIELD = re.compile(
    r'(?<![\w.\-])([A-Za-z][\w.]*)["\']?\s*[=:]\s*["\']?-?\d[\d,]*(?:\.\d+)?\s?(ms|us|µs|ns|s|%)?(?![\w.:/-])'
)
_UNITS = (("ms", r"_ms$|_millis(?:econds)?$"), ("us", r"_us$|_micros(?:econds)?$"), ("s", r"_s$|_secs?$|_seconds$"))
_STEP = "step_latency_seconds"
_DURATIONS: tuple[tuple[str, str, dict[str, str]], ...] = (  # the first that fits the name
    (r"all_?reduce", "communication_seconds_total", {"op": "all_reduce"}),
    (r"all_?gather", "communication_seconds_total", {"op": "all_gather"}),
    (r"all_?to_?all|a2a", "communication_seconds_total", {"op": "all_to_all"}),
    (r"nccl|comm", "communication_seconds_total", {"op": "all"}),
    (r"ttft|first_?token", "request_time_to_first_token_seconds", {}),
    (r"queue|wait|sched|pending|admi", "request_queue_wait_seconds", {}),
    (r"prefill", _STEP, {"phase": "prefill"}),
    (r"decode", _STEP, {"phase": "decode"}),
    (r"step|forward|fwd|iter|infer|compute", _STEP, {"phase": "mixed"}),
    (r"total|e2e|end_?to_?end|latency|elapsed|duration|took|time", "request_latency_seconds", {}),
)
_COUNTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (r"(?:prompt|input).*tok|tok.*(?:prompt|input)", "tokens_total", {"kind": "prompt"}),
    (r"(?:output|gen|compl).*tok|tok.*(?:output|gen|compl)", "tokens_total", {"kind": "generation"}),
    (r"^(?:num_?)?running", "requests_running", {}),
    (r"^(?:num_?)?(?:waiting|pending|queued)", "requests_waiting", {}),
    (r"kv.*usage|cache.*usage", "kv_cache_usage_ratio", {}),
)


def mapping(text: str) -> str:
    """A settings file with log.fields for the fields of *text* that look like signals; empty if there are none.

    A guess by name and unit, meant to be read before it is used.
    """
    seen: Counter[tuple[str, str]] = Counter((m[1], m[2] or "") for m in _FIELD.finditer(text))
    lines: dict[str, str] = {}
    for (name, suffix), count in seen.most_common():
        if name not in lines and (entry := _entry(name, suffix)):
            lines[name] = f"    {name}: {entry}   # seen {count} times"
    if not lines:
        return ""
    return "log:\n  fields:\n" + "\n".join(lines[name] for name in sorted(lines)) + "\n"


def _entry(name: str, suffix: str) -> str:
    lower = name.lower()
    unit = suffix or next((unit for unit, ending in _UNITS if re.search(ending, lower)), "")
    table = _DURATIONS if unit in ("ms", "us", "µs", "ns", "s") else _COUNTS
    found = next(((signal, labels) for words, signal, labels in table if re.search(words, lower)), None)
    if found is None:
        return ""
    signal, labels = found
    given = f", labels: {{{', '.join(f'{k}: {v}' for k, v in labels.items())}}}" if labels else ""
    told = f", unit: '{unit}'" if unit else ""
    entry = f"{{signal: {signal}{told}{given}}}"
    if signal == "request_latency_seconds":  # a line that tells it is a request that came to its end
        entry = f"[{entry}, {{signal: requests_total, value: '1', labels: {{outcome: ok}}}}]"
    return entry
