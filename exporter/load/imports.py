"""Results that other load generators wrote, as runs of ours.

Read are hey (its text, or ``-o csv``), ``vllm bench serve --save-result``, GuideLLM (JSON) and AIPerf
(profile_export_aiperf.json), each found out by what is in the file. What a tool does not tell is None: hey counts no
tokens, and its text has no interval. A failed request counts as infinitely slow wherever there is a list of the others;
where a tool tells only quantiles of the answers, they stay its own.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from exporter.load import result
from exporter.load.result import Condition, Level, Quantiles, Run
from exporter.strictyaml import ConfigError

_MS = 1000.0
_HEY_QUANTILE = re.compile(r"^\s*(\d+)% in ([\d.]+) secs", re.MULTILINE)
_HEY_CODE = re.compile(r"^\s*\[(\d+)\]\s+(\d+) responses", re.MULTILINE)
_HEY_ERROR = re.compile(r"^\s*\[(\d+)\]\s+(.+)$", re.MULTILINE)


def read(name: str) -> list[tuple[str, Run]]:
    """The runs in the file called *name*, each with a name for it; ``FILE@key=value,…`` adds what the file lacks.

    Raises ConfigError.
    """
    path, given = _asked(name)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    runs = _runs(data, str(path), given)
    for run in runs:
        for level in run.levels:
            if flaw := result.flaw(level):
                raise ConfigError([f"{path}: {flaw}"])
    concurrency = given.pop("concurrency", None)
    told = [msgspec.structs.replace(run, conditions=run.conditions | given) for run in runs]
    if concurrency is not None and any(run.level(int(concurrency)) is None for run in told):
        raise ConfigError([f"{path}: is of another concurrency than {concurrency}"])
    return [(path.name if len(told) == 1 else f"{path.name} #{n}", run) for n, run in enumerate(told, 1)]


def different(names: Sequence[str]) -> None:
    """Raises ConfigError if two of *names* are of one file: it would be compared with itself."""
    seen: dict[Path, str] = {}
    for name in names:
        path = _asked(name)[0].resolve()
        if path in seen:
            raise ConfigError([f"{name}: is the same file as {seen[path]}; give two results"])
        seen[path] = name


def _asked(name: str) -> tuple[Path, dict[str, Condition]]:
    """``FILE@key=value,…`` in its parts; a file whose name has such an end is that file."""
    file, at, rest = name.rpartition("@")
    if not at or "=" not in rest or Path(name).exists():
        return Path(name), {}
    given: dict[str, Condition] = {}
    for part in rest.split(","):
        key, equals, value = (text.strip() for text in part.partition("="))
        if not key or not equals or not value:
            raise ConfigError([f"{name}: behind @ must stand key=value,…, got {part!r}"])
        given[key] = int(value) if value.isdigit() else value
    return Path(file), given


def _runs(data: bytes, name: str, given: Mapping[str, Condition]) -> list[Run]:
    text = data.decode("utf-8", "replace")
    if text.lstrip().startswith("{"):
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ConfigError([f"{name}: not JSON: {error}"]) from None
        for key, reader in _JSON.items():
            if key in document:
                try:
                    return reader(document)
                except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
                    raise ConfigError([f"{name}: looks like {_TOOLS[key]}, but lacks {error}"]) from None
        if "stopline_result" in document:
            return result.read(data, name).runs
    concurrency = given.get("concurrency")
    if "Latency distribution:" in text and "Requests/sec:" in text:
        return [_hey(_hey_text(text), concurrency, name)]
    if text.startswith("response-time,"):
        return [_hey(_hey_csv(text), concurrency, name)]
    kinds = "stopline ramp, hey (text or CSV), vllm bench serve, GuideLLM or AIPerf"
    raise ConfigError([f"{name}: not a result of {kinds}"])


def _hey(level: Callable[[int], Level], concurrency: Condition | None, name: str) -> Run:
    if not isinstance(concurrency, int) or concurrency < 1:
        raise ConfigError([f"{name}: hey does not tell how many clients it had: write {name}@concurrency=N"])
    return Run({"tool": "hey"}, [level(concurrency)])


def _hey_text(text: str) -> Callable[[int], Level]:
    quantiles = {int(q): float(seconds) for q, seconds in _HEY_QUANTILE.findall(text)}
    codes = {int(code): int(count) for code, count in _HEY_CODE.findall(text)}
    errors = {f"http_{code}": count for code, count in codes.items() if code != 200}
    _, _, failures = text.partition("Error distribution:")
    for count, detail in _HEY_ERROR.findall(failures):
        kind = "timeout" if "deadline exceeded" in detail or "Timeout" in detail else "connection"
        errors[kind] = errors.get(kind, 0) + int(count)
    made = sum(codes.values()) + sum(n for kind, n in errors.items() if not kind.startswith("http_"))
    seconds = _number(r"Total:\s+([\d.]+) secs", text)
    average = _number(r"Average:\s+([\d.]+) secs", text)
    latency = Quantiles(quantiles.get(50), quantiles.get(95), quantiles.get(99), average)
    return lambda concurrency: _level(concurrency, made, seconds, latency, answered=codes.get(200, 0), errors=errors)


def _hey_csv(text: str) -> Callable[[int], Level]:
    rows = list(csv.DictReader(text.splitlines()))
    took = [(float(row["response-time"]), int(row["status-code"]), float(row["offset"])) for row in rows]
    latencies = [seconds if code == 200 else math.inf for seconds, code, _ in took]
    errors: dict[str, int] = {}
    for _, code, _ in took:
        if code != 200:
            errors[f"http_{code}"] = errors.get(f"http_{code}", 0) + 1
    span = max((seconds + offset for seconds, _, offset in took), default=0.0)
    good = sum(code == 200 for _, code, _ in took)

    def level(concurrency: int) -> Level:
        found = _level(concurrency, len(rows), span, Quantiles.of(latencies), answered=good, errors=errors)
        return msgspec.structs.replace(found, latencies=latencies)

    return level


def _vllm(document: dict[str, Any]) -> list[Run]:
    """``vllm bench serve --save-result`` (vllm/benchmarks/serve.py); times in ms, quantiles as they were asked for."""
    failed = int(document.get("failed") or 0)
    made = int(document["num_prompts"])
    alone: list[float] = document.get("latencies") or []  # seconds; older versions kept none

    def quantiles(metric: str) -> Quantiles:
        told = [document.get(f"p{q}_{metric}_ms") for q in (50, 95, 99)]
        told[0] = told[0] if told[0] is not None else document.get(f"median_{metric}_ms")
        return Quantiles(*(None if v is None else v / _MS for v in (*told, document.get(f"mean_{metric}_ms"))))

    latencies = [*map(float, alone), *[math.inf] * failed] if len(alone) == document["completed"] else []
    level = _level(
        int(document.get("max_concurrency") or made),
        made,
        float(document["duration"]),
        Quantiles.of(latencies) if latencies else quantiles("e2el"),
        answered=int(document["completed"]),
        errors={"failed": failed} if failed else {},
        tokens=float(document["output_throughput"]),
    )
    level = msgspec.structs.replace(
        level, latencies=latencies, first_token=quantiles("ttft"), inter_token=quantiles("tpot")
    )
    conditions: dict[str, Condition] = {"tool": "vllm bench serve", "model": str(document["model_id"])}
    if document.get("request_rate", "inf") != "inf":
        conditions["request_rate"] = document["request_rate"]
    conditions["input_tokens"] = round(document["total_input_tokens"] / made)
    return [Run(conditions, [level])]


def _guidellm(document: dict[str, Any]) -> list[Run]:
    """A report of GuideLLM (guidellm/schemas): a benchmark for each rate; the latency in s, token times in ms."""
    runs = []
    for benchmark in document["benchmarks"]:
        metrics = benchmark["metrics"]
        settings = benchmark.get("config") or benchmark.get("args") or {}
        strategy = settings.get("strategy") or {}
        streams = strategy.get("streams") or (1 if strategy.get("type_") == "synchronous" else None)
        if streams is None:  # an open loop: what was in flight on average
            streams = max(round(metrics["request_concurrency"]["successful"]["mean"]), 1)
        totals = metrics["request_totals"]
        errors = {"failed": int(totals["errored"])} if totals["errored"] else {}
        level = _level(
            int(streams),
            int(totals["successful"]) + int(totals["errored"]),
            float(benchmark.get("duration") or 0.0),
            _of_guidellm(metrics["request_latency"], 1.0),
            answered=int(totals["successful"]),
            errors=errors,
            tokens=metrics["output_tokens_per_second"]["successful"]["mean"],
        )
        level = msgspec.structs.replace(
            level,
            requests_per_second=metrics["requests_per_second"]["successful"]["mean"],
            first_token=_of_guidellm(metrics["time_to_first_token_ms"], _MS),
            inter_token=_of_guidellm(metrics["inter_token_latency_ms"], _MS),
        )
        conditions: dict[str, Condition] = {"tool": "GuideLLM"}
        if model := (settings.get("backend") or {}).get("model"):
            conditions["model"] = str(model)
        prompts = metrics.get("prompt_token_count", {}).get("successful")
        if prompts:
            conditions["input_tokens"] = round(prompts["mean"])
        runs.append(Run(conditions, [level]))
    return runs


def _of_guidellm(metric: dict[str, Any], scale: float) -> Quantiles:
    told = metric["successful"]
    at = told["percentiles"]
    return Quantiles(*(value / scale for value in (at["p50"], at["p95"], at["p99"], told["mean"])))


def _aiperf(document: dict[str, Any]) -> list[Run]:
    """profile_export_aiperf.json (docs.nvidia.com/aiperf, JSON export schema); each metric tells its unit."""

    def quantiles(name: str) -> Quantiles:
        metric = document.get(name)
        if not metric:
            return Quantiles()
        scale = {"ms": _MS, "sec": 1.0, "s": 1.0}[metric["unit"]]
        return Quantiles(*(metric[key] / scale for key in ("p50", "p95", "p99", "avg")))

    def value(name: str) -> float:
        return float((document.get(name) or {}).get("avg") or 0.0)

    settings = document["input_config"]
    phases = [phase for phase in settings.get("phases", []) if phase.get("kind", "profiling") == "profiling"]
    concurrency = phases[0].get("concurrency") if phases else (settings.get("loadgen") or {}).get("concurrency")
    failed, answered = int(value("error_request_count")), int(value("request_count"))
    level = _level(
        int(concurrency or 1),
        answered + failed,
        value("benchmark_duration"),
        quantiles("request_latency"),
        answered=answered,
        errors={"failed": failed} if failed else {},
        tokens=value("output_token_throughput") or None,
    )
    level = msgspec.structs.replace(
        level,
        requests_per_second=value("request_throughput"),
        first_token=quantiles("time_to_first_token"),
        inter_token=quantiles("inter_token_latency"),
    )
    models = settings.get("models") or (settings.get("endpoint") or {}).get("model_names") or []
    names = models.get("items", []) if isinstance(models, dict) else models
    conditions: dict[str, Condition] = {"tool": "AIPerf"}
    if names:
        conditions["model"] = names[0]["name"] if isinstance(names[0], dict) else str(names[0])
    if document.get("input_sequence_length"):
        conditions["input_tokens"] = round(value("input_sequence_length"))
    return [Run(conditions, [level])]


def _level(
    concurrency: int,
    made: int,
    seconds: float | None,
    latency: Quantiles,
    *,
    answered: int,
    errors: dict[str, int],
    tokens: float | None = None,
) -> Level:
    return Level(
        concurrency=concurrency,
        requests=made,
        passes=1,
        seconds=seconds or 0.0,
        latency=latency,
        first_token=Quantiles(),
        inter_token=Quantiles(),
        requests_per_second=answered / seconds if seconds else None,
        tokens_per_second=tokens,
        errors=errors,
    )


def _number(pattern: str, text: str) -> float | None:
    match = re.search(pattern, text)
    return float(match[1]) if match else None


_JSON: dict[str, Callable[[dict[str, Any]], list[Run]]] = {
    "request_throughput": lambda d: _aiperf(d) if isinstance(d["request_throughput"], dict) else _vllm(d),
    "benchmarks": _guidellm,
}
_TOOLS = {"request_throughput": "a result of vllm bench serve or AIPerf", "benchmarks": "a report of GuideLLM"}
