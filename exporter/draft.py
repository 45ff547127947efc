"""A first mapping for the log of a server Stopline does not know, from the fields it finds there."""

import re
from collections import Counter

_FIELD = re.compile(
    r'(?<![\w.\-])([A-Za-z][\w.]*)["\']?\s*[=:]\s*["\']?-?\d[\d,]*(?:\.\d+)?\s?(ms|us|µs|ns|s|%)?(?![\w.:/-])'
)
_UNITS = (("ms", r"_ms$|_millis(?:econds)?$"), ("us", r"_us$|_micros(?:econds)?$"), ("s", r"_s$|_secs?$|_seconds$"))
_STEP, _REQUEST = "step_latency_seconds", "request_latency_seconds"
_ABOUT_STEP = re.compile(r"(?i)\b(?:step|iter(?:ation)?|forward|prefill|decode)\b")
_MOST, _MOST_FIELDS, _LONGEST = 20, 200, 64
_DURATIONS: tuple[tuple[str, str, dict[str, str]], ...] = (  # the first that fits the name
    (r"all_?reduce", "communication_seconds_total", {"op": "all_reduce"}),
    (r"all_?gather", "communication_seconds_total", {"op": "all_gather"}),
    (r"all_?to_?all|a2a", "communication_seconds_total", {"op": "all_to_all"}),
    (r"nccl|comm", "communication_seconds_total", {"op": "all"}),
    (r"ttft|^first(?:_|$)|first_?token", "request_time_to_first_token_seconds", {}),
    (r"queue|wait|sched|pending|admi", "request_queue_wait_seconds", {}),
    (r"prefill", _STEP, {"phase": "prefill"}),
    (r"decode", _STEP, {"phase": "decode"}),
    (r"step|forward|fwd|iter|infer|compute", _STEP, {"phase": "mixed"}),
    (r"total|e2e|end_?to_?end|latency|elapsed|duration|took|time", _REQUEST, {}),
)
_COUNTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (r"(?:prompt|input).*tok|tok.*(?:prompt|input)|^in$", "tokens_total", {"kind": "prompt"}),
    (r"(?:output|gen|compl).*tok|tok.*(?:output|gen|compl)|^out$", "tokens_total", {"kind": "generation"}),
    (r"^(?:num_?)?running", "requests_running", {}),
    (r"^(?:num_?)?(?:waiting|pending|queued)", "requests_waiting", {}),
    (r"kv.*usage|cache.*usage", "kv_cache_usage_ratio", {}),
)


def mapping(text: str) -> str:
    """A settings file with log.fields for the fields of *text* that look like signals; empty if there are none.

    A guess by name and unit, and by whether the line is about a step, meant to be read before it is used.
    """
    seen: Counter[tuple[str, str, bool]] = Counter()
    for line in text.splitlines():
        about_step = bool(_ABOUT_STEP.search(line))
        seen.update((m[1], m[2] or "", about_step) for m in _FIELD.finditer(line))
    counts = Counter[str]()
    lines: dict[str, str] = {}
    for (name, suffix, about_step), count in seen.most_common():
        counts[name] += count
        if (
            name not in lines
            and len(lines) < _MOST_FIELDS
            and len(name) <= _LONGEST
            and (entry := _entry(name, suffix, about_step))
        ):
            lines[name] = entry
    if not lines:
        return ""
    drafted = (f"    {_key(name)}: {lines[name]}   # seen {counts[name]} times\n" for name in sorted(lines))
    left = sorted(counts.keys() - lines.keys())
    rest = f"# fields that say nothing by their names: {', '.join(left[:_MOST])}{', …' if left[_MOST:] else ''}\n"
    return "log:\n  fields:\n" + "".join(drafted) + (rest if left else "")


def _key(name: str) -> str:
    """*name* as a key of YAML, which makes a boolean of ``on`` and a number of ``e3``."""
    return name if re.fullmatch(r"(?!(?i:y|n|yes|no|on|off|true|false|null)$)[A-Za-z]\w*", name) else f"'{name}'"


def _entry(name: str, suffix: str, about_step: bool) -> str:
    lower = name.lower()
    unit = suffix or next((unit for unit, ending in _UNITS if re.search(ending, lower)), "")
    table = _DURATIONS if unit in ("ms", "us", "µs", "ns", "s") else _COUNTS
    found = next(((signal, labels) for words, signal, labels in table if re.search(words, lower)), None)
    if found is None:
        return ""
    signal, labels = found
    if signal == _REQUEST and about_step:
        signal, labels = _STEP, {"phase": "mixed"}
    given = f", labels: {{{', '.join(f'{k}: {v}' for k, v in labels.items())}}}" if labels else ""
    told = f", unit: '{unit}'" if unit else ""
    entry = f"{{signal: {signal}{told}{given}}}"
    if signal == _REQUEST:  # a line that tells it is a request that came to its end
        entry = f"[{entry}, {{signal: requests_total, value: '1', labels: {{outcome: ok}}}}]"
    return entry
