"""Every bundled profile keeps the promises that stand in it: samples, rejects, error corpus, coverage of captures."""

import dataclasses
import fnmatch
import json
from pathlib import Path

import pytest
from harness import Reader

from exporter import catalog, strictyaml, verify
from exporter.engines import profile as profiles
from exporter.engines.literal import literals_of
from exporter.engines.profile import Profile
from exporter.sources.page import PageReader, names_of
from exporter.strictyaml import ConfigError

FIXTURES = Path(__file__).parent / "fixtures"
PROFILES = [profiles.bundled(name) for name in profiles.names()]
PATTERNS = [pytest.param(p, pattern, id=f"{p.engine}-{pattern.name}") for p in PROFILES for pattern in p.log.patterns]
CORPUS = [
    pytest.param(profile, sample, id=f"{profile.engine}-{n}")
    for profile in PROFILES
    for n, sample in enumerate((*profile.log.errors.samples, *profiles.shared().samples))
]
PAGES = sorted(FIXTURES.glob("*/*/*metrics*.txt"))


@pytest.mark.parametrize("engine", profiles.names())
def test_libyaml_reads_a_profile_as_the_strict_loader_does(engine: str) -> None:
    path = Path(profiles.__file__).with_name(f"{engine}.yaml")
    assert dataclasses.asdict(profiles.bundled(engine)) == dataclasses.asdict(profiles.load(path))


@pytest.mark.parametrize(("profile", "pattern"), PATTERNS)
def test_samples_give_what_they_say_and_rejects_nothing(profile: Profile, pattern) -> None:
    assert pattern.literals, "a bundled pattern must not be tried on every line"
    assert list(verify.patterns(profile, [pattern])) == []


@pytest.mark.parametrize(("profile", "sample"), CORPUS)
def test_the_error_corpus_counts_each_failure_once_and_nothing_else(profile: Profile, sample) -> None:
    assert list(verify.errors(profile, [sample])) == []


@pytest.mark.parametrize(
    "log", [pytest.param(p, id=str(p.relative_to(FIXTURES))) for p in sorted(FIXTURES.glob("*/*/**/*.log"))]
)
def test_no_line_of_a_captured_log_looks_like_a_pattern_and_fits_none(log: Path) -> None:
    reader = Reader(log.relative_to(FIXTURES).parts[0]).feed(log.read_bytes())
    assert reader.store.counters[catalog.LOG_UNPARSED] == {}


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(FIXTURES))) for p in PAGES])
def test_every_metric_of_a_captured_page_is_mapped_or_knowingly_ignored(page: Path) -> None:
    text = page.read_text()
    engine = profiles.of_page(names_of(text))
    assert engine == page.relative_to(FIXTURES).parts[0]
    profile = profiles.bundled(engine)
    reader = PageReader(profile)
    mapped = {name for rules in profile.page_rules().values() for rule in rules for name in rule.all_names}
    mapped |= {info.sample for info in profile.info.values()}
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    unknown = {
        name
        for name in map(reader.canonical, families)
        if not name.endswith("_created")
        and name not in mapped
        and name + "_total" not in mapped
        and not any(fnmatch.fnmatch(name, pattern) for pattern in profile.ignored)
    }
    assert unknown == set()


@pytest.mark.parametrize(
    ("engine", "capture"),
    [
        ("vllm", "vllm/0.32.0/startup.log"),
        ("vllm", "vllm/0.32.0-hy3/startup.log"),
        ("sglang", "sglang/0.5.23/startup.log"),
        ("llamacpp", "llamacpp/11434/startup.log"),
        ("llamacpp", "llamacpp/11434/xllamacpp-startup.log"),
        ("llamacpp", "llamacpp/11434/serving.log"),
        ("vllm", "vllm/0.32.0/serving.log"),
        ("vllm", "vllm/0.32.0/errors/kill-worker-sigkill.log"),
        ("sglang", "sglang/0.5.23/serving.log"),
        ("tgi", "tgi/constructed/serving.log"),
        ("trtllm", "trtllm/constructed/serving.log"),
        ("lmdeploy", "lmdeploy/constructed/serving.log"),
        ("deepinfer", "deepinfer/constructed/serving.log"),
        ("triton", "triton/constructed/serving.log"),
        ("nim", "nim/constructed/serving.log"),
        ("nim", "nim/constructed/serving-jsonl.log"),
        ("dynamo", "dynamo/constructed/serving.log"),
        ("dynamo", "dynamo/constructed/serving-jsonl.log"),
        ("vllm", "vllm/constructed-v0/serving.log"),
        ("vllm", "vllm/constructed-ranks/tp4-ep4.log"),
        ("sglang", "sglang/constructed-0.4/serving.log"),
        ("sglang", "sglang/constructed-ranks/serving.log"),
        ("", "vllm/0.32.0/errors/bad-flag.log"),
    ],
)
def test_an_engine_is_recognised_by_its_start_up_log(engine: str, capture: str) -> None:
    assert profiles.of_log((FIXTURES / capture).read_bytes()) == engine


def test_an_engine_is_recognised_through_the_colours_of_its_log() -> None:
    dim, end = b"\x1b[2m", b"\x1b[0m"
    time = dim + b"2026-11-30T09:00:00.104211Z" + end + b" \x1b[32m INFO" + end + b" "
    start = dim + b"text_generation_launcher" + end + dim + b":" + end + b" Args {\n"
    span = b"\x1b[1mgenerate{\x1b[3mtime_per_token" + end + dim + b"=" + end + b'"61ms"\x1b[1m}' + end + dim + b": "
    done = span + b"text_generation_router::server" + end + b": router/src/server.rs:432: Success\n"
    assert profiles.of_log(time + start) == "tgi"
    assert profiles.of_log(time + done) == "tgi"


@pytest.mark.parametrize(
    "line",
    [
        # --logging-config.formatter json, as python-json-logger 4.2 writes it
        '{"asctime": "2026-11-30 12:18:00,707", "levelname": "INFO", "name": "vllm.entrypoints.common.startup", '
        """"processName": "APIServer", "process": 914, "message": "non-default args: {'port': 9311}"}""",
        '(EngineCore pid=956) {"levelname":"INFO","name":"vllm.v1.engine.core","message":"Initializing a V1 LLM engine"}',
        '{"timestamp": "2026-11-30T12:18:00Z", "name": "vllm.v1.engine.core", "levelname": "WARNING", "message": "x"}',
    ],
)
def test_vllm_is_recognised_by_the_name_of_its_logger_in_json(line: str) -> None:
    assert profiles.of_log(line.encode()) == "vllm"


@pytest.mark.parametrize(
    "before", ['{"levelname": "INFO", "name": "app", ', '{"levelname": "INFO", ', '{"role": "user", ', ""]
)
@pytest.mark.parametrize(
    "prompt",
    [
        "non-default args: {'port': 9311}",
        '{"levelname": "INFO", "name": "vllm.v1.engine.core", "message": "non-default args: {}"}',
        'x", "levelname": "INFO", "name": "vllm.v1.engine.core", "message": "non-default args: {}',
        '\n{"levelname": "INFO", "name": "vllm.v1.engine.core", "message": "non-default args: {}"}',
    ],
)
def test_a_prompt_in_json_is_not_an_engine(before: str, prompt: str) -> None:
    for key in ("message", "name", "prompt"):
        told = json.dumps({key: prompt, "more": {"levelname": "INFO", "name": "vllm.core", "message": prompt}})
        assert profiles.of_log((before + told[1:] if before else f"INFO prompt: {told}").encode()) == ""


@pytest.mark.parametrize("profile", PROFILES)
def test_every_mark_of_an_engine_can_be_searched_for_by_a_literal(profile: Profile) -> None:
    assert all(literals_of(regex) for regex in profile.detect.log)
    assert all(literals_of(echo.regex) for echo in profile.log.echoes)


def test_a_prompt_that_talks_of_an_engine_is_not_one() -> None:
    assert profiles.of_log(b"INFO prompt: 'why non-default args: in vLLM? server_args= too'\n") == ""


def test_what_hints_look_for_is_read() -> None:
    """A metric by its buckets, which only a rule has parsed, and a pattern by its name."""
    for profile in PROFILES:
        named = {name for rules in profile.page_rules().values() for rule in rules for name in rule.names}
        assert {name for hint in profile.hints for name in hint.metrics} <= named
    with pytest.raises(ConfigError) as caught:
        strictyaml.parse("engine: x\nhints: [{flag: a, gives: b, patterns: [steps]}]\n", Profile, "x.yaml")
    assert caught.value.problems == ("x.yaml:2: hints: no pattern 'steps' in log.patterns",)
