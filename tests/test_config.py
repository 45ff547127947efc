"""Every fault of a settings file gets its own message: file, line, key, problem, remedy."""

from pathlib import Path

import pytest

from exporter import config
from exporter.engines import profile as profiles
from exporter.strictyaml import ConfigError

FAULTS = Path(__file__).parent / "fixtures" / "config"
EXPECTED: dict[str, list[str]] = {
    "bad-address": [
        "bad-address.yml:2: web.listen_address: must be [HOST]:PORT, got '10777'",
    ],
    "bad-devices": [
        "bad-devices.yml:2: gpus.devices: must be auto, all, none or a list, got 'first'",
    ],
    "bad-duration": [
        "bad-duration.yml:2: scrape.interval: expected a duration such as 500ms, 10s or 5m, got '1 second'",
        "bad-duration.yml:4: log.collapse: expected a duration such as 500ms, 10s or 5m, got '10'",
    ],
    "alias-bomb": [
        "alias-bomb.yml: more than 100000 values; is one list repeated by its alias?",
    ],
    "bad-port": [
        "bad-port.yml:2: engine.url: must start with http:// or https:// and name a host, got 'http://127.0.0.1:99999'",
    ],
    "bad-range": [
        "bad-range.yml:3: scrape.timeout: must be above 0 and not above interval, or polls would overlap",
        "bad-range.yml:5: thresholds.error_ratio: must be a ratio from 0 to 1, got 5",
        "bad-range.yml:7: histograms.factor: must be from 1.05 to 4",
    ],
    "bad-regex": [
        "bad-regex.yml:4: log.patterns[0].regex: not a regular expression: unterminated character set at position 12",
    ],
    "bad-repetition": [
        "bad-repetition.yml:4: log.patterns[0].regex: not a regular expression: the repetition number is too large",
    ],
    "bad-signal": [
        "bad-signal.yml:3: log.fields.wait_us: no family 'queue_wait' in the catalog (did you mean 'request_queue_wait_seconds'?)",
        "bad-signal.yml:4: log.fields.step_us.unit: must be one of s, ms, us, µs, μs, ns, min, %, B, KiB, MiB, GiB, KB, MB, GB, got 'usec'",
        "bad-signal.yml:5: log.fields.wait_ms: request_queue_wait_seconds takes no labels here, got pod",
        "bad-signal.yml:6: log.fields.fwd_ms: label phase must be one of prefill, decode, mixed, got 'warm'",
    ],
    "bad-size": [
        "bad-size.yml:2: scrape.max_bytes: expected a size such as 4096, 64KiB or 1GiB, got '16MB'",
    ],
    "bad-url": [
        "bad-url.yml:2: engine.url: must start with http:// or https:// and name a host, got '127.0.0.1:8000'",
    ],
    "beyond-all-measure": [
        "beyond-all-measure.yml:2: scrape.max_bytes: expected a size such as 4096, 64KiB or 1GiB, got one beyond all measure",
        "beyond-all-measure.yml:4: thresholds.latency_ratio: expected a number, got 'nan'",
        "beyond-all-measure.yml:5: thresholds.min_requests: expected a number, got '.inf'",
        "beyond-all-measure.yml:7: histograms.factor: expected a number, got '1e400'",
    ],
    "both-credentials": [
        "both-credentials.yml:4: scrape.bearer_token_file: excludes username: give one of the two",
    ],
    "duplicate-key": [
        "duplicate-key.yml:5: engine: given twice, first on line 1",
    ],
    "list-for-mapping": [
        "list-for-mapping.yml:2: engine: expected a mapping, got a list",
    ],
    "missing-group": [
        "missing-group.yml:3: log.patterns[0]: pattern wait: no group named 'millis' in the regex",
    ],
    "missing-required": [
        "missing-required.yml:3: log.patterns[0].name: is required",
    ],
    "nested-deeply": [
        "nested-deeply.yml:1: nested too deeply",
    ],
    "no-as-text": [
        'no-as-text.yml:2: engine.model: no is a boolean in YAML; for the word write "no" in quotes',
    ],
    "not-utf8": [
        "not-utf8.yml: cannot be read: not UTF-8 text",
    ],
    "not-yaml": [
        "not-yaml.yml:3: not YAML: expected <block end>, but found '<block mapping start>'",
    ],
    "nul": [
        "nul.yml:2: log.paths[0]: holds a NUL character, which no path and no name can",
    ],
    "several": [
        "several.yml:2: engine.nam: unknown key (did you mean 'name'?)",
        "several.yml:3: engine.url: must start with http:// or https:// and name a host, got 'ftp://host'",
        "several.yml:5: gpus.interval: expected a duration such as 500ms, 10s or 5m, got 'fast'",
        "several.yml:6: web: expected a mapping, got '10777'",
    ],
    "text-for-list": [
        "text-for-list.yml:2: log.paths: expected a list, got '/var/log/vllm/server.log'; write ['/var/log/vllm/server.log']",
    ],
    "unknown-engine": [
        f"unknown-engine.yml:2: engine.name: must be auto or one of {', '.join(profiles.names())}, got 'vlm'",
    ],
    "unknown-key": [
        "unknown-key.yml:4: log.path: unknown key (did you mean 'paths'?)",
    ],
    "unknown-section": [
        "unknown-section.yml:1: treshold: unknown key (did you mean 'thresholds'?)",
    ],
    "url-with-password": [
        "url-with-password.yml:2: engine.url: must hold no user or password: give scrape.username and scrape.password_file",
    ],
    "url-of-the-page": [
        "url-of-the-page.yml:2: engine.url: must be the server's base address, without /metrics, got 'http://127.0.0.1:8000/metrics'",
    ],
    "wrong-type": [
        "wrong-type.yml:2: thresholds.latency_ratio: expected a number, got 'twice'",
        "wrong-type.yml:4: scrape.max_bytes: expected a size such as 4096, 64KiB or 1GiB, got 'many'",
    ],
    "yes-as-boolean": [
        "yes-as-boolean.yml:2: scrape.insecure_skip_verify: expected true or false, got 'on'",
    ],
}


@pytest.mark.parametrize("fault", sorted(p.stem for p in FAULTS.glob("*.yml")))
def test_each_fault_is_told_in_full(fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(FAULTS / f"{fault}.yml")
    told = [problem.replace(str(FAULTS) + "/", "") for problem in caught.value.problems]
    assert told == EXPECTED[fault]
