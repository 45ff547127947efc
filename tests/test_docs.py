"""The README is true: its tables are built from the code, its examples run, and what it names exists.

``pytest tests/test_docs.py --update-golden`` rewrites the tables.
"""

import ast
import inspect
import os
import re
import shutil
import subprocess
import tomllib
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import click
import manifests
import pytest
import rules
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner
from harness import Clock, Reader
from prometheus_client import generate_latest

from exporter import __version__, catalog, cli, config, demo, remedies, strictyaml, webfile
from exporter.baseline import Pin
from exporter.catalog import Family
from exporter.config import Config, EngineConfig, GpuConfig, LogConfig
from exporter.doctor import services
from exporter.engines import profile as profiles
from exporter.engines.profile import Pattern
from exporter.sidecar import Sidecar
from exporter.sources import chunks, fetch, iterations, nvml, scrape
from exporter.strictyaml import Seconds, Size

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


# tables


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _prose(text: str) -> str:
    """*text* as it is to be read, whatever Markdown would make of its characters."""
    return re.sub(r"([|*<])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    return f"`{text}`"


def _docstrings(module: types.ModuleType) -> dict[str, dict[str, str]]:
    """What stands below each attribute of the module's classes; at run time it is gone."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                field.target.id: ast.literal_eval(below.value)
                for field, below in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            }
    return found


_KINDS = {
    str: "text",
    bool: "true or false",
    int: "whole number",
    float: "number",
    Path: "path",
    Seconds: "duration",
    Size: "size",
    Pattern: "patterns",
    Pin: "pins",
}


def _kind(hint: Any) -> str:
    """A type in the words of a person who writes the file."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(a) for a in arguments if a is not types.NoneType))
    if origin is Literal:
        return ", ".join(map(_code, arguments))
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "mapping"
    return _KINDS[hint]


def _default(value: Any, hint: Any) -> str:
    """A default as the file would have it; empty for none."""
    if value is None or value == "" or value in ((), {}):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if hint is Seconds:
        return f"{value:g}s" if value >= 1 else f"{value * 1000:g}ms"
    if hint is Size:
        return f"{value >> 20}MiB"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def settings() -> list[tuple[str, str, str, str]]:
    """Key, type, default and meaning of everything that can be set."""
    told = _docstrings(config)
    rows = []

    def walk(kind: type, prefix: str) -> None:
        hints = typing.get_type_hints(kind)
        for field in fields(kind):
            if is_dataclass(hints[field.name]):
                walk(hints[field.name], f"{prefix}{field.name}.")
                continue
            value = field.default if field.default is not MISSING else field.default_factory()
            hint = hints[field.name]
            meaning = told[kind.__name__][field.name]
            rows.append((prefix + field.name, _kind(hint), _default(value, hint), meaning))

    walk(Config, "")
    return rows


def settings_table() -> str:
    rows = [
        (_code(key), kind, _code(default) if default else "", _prose(meaning))
        for key, kind, default, meaning in settings()
    ]
    return _table(("key", "type", "default", "meaning"), rows)


def _key(option: click.Parameter, options: list[click.Parameter]) -> str:
    """The setting that a flag stands for."""
    flags = dict.fromkeys((str(o.name) for o in options if o.name != "path"), None)
    if option.name == "path":
        return ""
    given = cli._overrides(**flags | {str(option.name): "0"})
    ((section, values),) = given.items()
    return _code(".".join(filter(None, (section, *values))))


def flags_table() -> str:
    options = cli.main.commands["run"].params
    rows = [
        (", ".join(map(_code, o.opts)), _code(o.envvar), _key(o, options), _prose(o.help))
        for o in options
        if isinstance(o, click.Option)
    ]
    return _table(("flag", "environment", "setting", "meaning"), rows)


def load_flags_table(command: str) -> str:
    rows = []
    for option in cli.main.commands[command].params:
        if isinstance(option, click.Option):
            default = option.default if option.show_default else None
            shown = " / ".join(map(_code, (*option.opts, *option.secondary_opts)))
            value = (
                ("yes" if default else "no") if isinstance(default, bool) else "" if default is None else str(default)
            )
            rows.append((shown, _code(value) if value else "", _prose(option.help or "")))
    return _table(("flag", "default", "meaning"), rows)


def _meaning(family: Family) -> str:
    values = [f"{label}: {', '.join(map(_code, closed))}." for label, closed in family.closed]
    return " ".join([_prose(family.help), *values])


def metrics_table() -> str:
    rows = [(_code(f.name), f.kind, ", ".join(f.labels), _meaning(f)) for f in catalog.FAMILIES]
    return _table(("name", "type", "labels", "meaning"), rows)


def engines_table() -> str:
    known = map(profiles.bundled, profiles.names())
    rows = [(_code(p.engine), _prose(p.title), p.versions, _prose(p.tells)) for p in known]
    return _table(("name", "engine", "versions", "what it tells"), rows)


def fields_table() -> str:
    rows: dict[str, list[str]] = {}
    for name, signals in profiles.bundled(profiles.GENERIC).log.fields.items():
        for signal in signals if isinstance(signals, tuple) else (signals,):
            labels = ", ".join(signal.labels.values())
            unit = signal.unit or ("s" if signal.family.name.endswith(("_seconds", "_seconds_total")) else "")
            means = f"{_code(signal.signal)}{f' ({labels})' if labels else ''}"
            rows.setdefault(means, []).append(f"{_code(name)}{f' {unit}' if unit else ''}")
    return _table(("means", "names"), [(means, ", ".join(names)) for means, names in rows.items()])


def hints_table() -> str:
    known = map(profiles.bundled, profiles.names())
    rows = [(p.title, hint.flag, hint.gives) for p in known for hint in p.hints]
    return _table(("engine", "flag", "gives"), rows)


def reasons_table(reasons: dict[str, remedies.Advice]) -> str:
    return _table(("reason", "cause", "remedy"), [(_code(reason), *advice) for reason, advice in reasons.items()])


def alerts_table() -> str:
    rows: dict[str, tuple[str, str, str, str]] = {}
    for rule in sorted(rules.alerts(), key=lambda rule: list(services._ALERTS).index(rule["alert"])):
        name, labels = rule["alert"], rule["labels"]
        rows.setdefault(name, (
            f"[`{name}`](deploy/runbooks/{name}.md)", labels["severity"], rule.get("for", "at once"), _prose(rule["annotations"]["summary"])
        ))  # fmt: skip
    return _table(("alert", "severity", "after", "fires when"), list(rows.values()))


TABLES: dict[str, Callable[[], str]] = {
    "alerts": alerts_table,
    "fields": fields_table,
    "flags": flags_table,
    "ramp flags": lambda: load_flags_table("ramp"),
    "compare flags": lambda: load_flags_table("compare"),
    "settings": settings_table,
    "metrics": metrics_table,
    "engines": engines_table,
    "hints": hints_table,
    "page reasons": lambda: reasons_table(remedies.PAGE),
    "log reasons": lambda: reasons_table(remedies.LOG),
    "gpu reasons": lambda: reasons_table(remedies.GPU),
    "service reasons": lambda: reasons_table(remedies.SERVICE),
}


# finding things in the README


def readme() -> str:
    return README.read_text()


def between(marker: str) -> str:
    """What stands between ``<!-- marker -->`` and the next ``<!-- end -->``."""
    _, found, rest = readme().partition(f"<!-- {marker} -->\n")
    text, ended, _ = rest.partition("<!-- end -->")
    assert bool(found and ended), f"no <!-- {marker} --> … <!-- end --> in the README"
    return text


def example(name: str) -> str:
    """The fenced block behind ``<!-- example: name -->``."""
    match = re.search(rf"<!-- example: {name} -->\n```\w*\n(.*?)^```$", readme(), re.DOTALL | re.MULTILINE)
    assert match, f"no example {name!r} in the README"
    return match[1]


def first_column(table: str) -> list[str]:
    return re.findall(r"(?m)^\| `([^`]+)`", table)


def settings_of(name: str, tmp_path: Path) -> Config:
    path = tmp_path / "stopline.yml"
    path.write_text(example(name))
    return config.load(path)


# tables are what the code says


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_what_the_code_says(name: str, request: pytest.FixtureRequest) -> None:
    built = TABLES[name]()
    if request.config.getoption("--update-golden"):
        old = f"<!-- table: {name} -->\n{between(f'table: {name}')}<!-- end -->"
        README.write_text(readme().replace(old, f"<!-- table: {name} -->\n{built}<!-- end -->"))
    assert between(f"table: {name}") == built, "rerun with --update-golden and read the diff"


def test_every_setting_is_described_and_its_default_reads_as_itself() -> None:
    for key, kind, default, meaning in settings():
        assert meaning.endswith("."), key
        if default and not kind.startswith(("list", "mapping")):
            section, _, name = key.rpartition(".")
            text = f"{section}: {{{name}: '{default}'}}" if section else f"{name}: '{default}'"
            if kind == "true or false":
                text = text.replace("'", "")
            assert strictyaml.parse(text, Config, key) == Config(), key


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = (*project["dependencies"], *project["optional-dependencies"]["traces"])
    names = {re.split(r"[<>=!~\[; ]", each)[0] for each in wanted}
    assert set(first_column(between("dependencies"))) == names


# every reason a source can give is in the troubleshooting section


def _said(*modules: types.ModuleType) -> set[str]:
    """The reasons in ``Unreadable(reason, …)``; of one put together only the fixed part."""
    said = set()
    for node in ast.walk(ast.parse("".join(map(inspect.getsource, modules)))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Unreadable":
            reason = node.args[0]
            parts = ast.walk(reason) if not isinstance(reason, ast.IfExp) else (reason.body, reason.orelse)
            constant = [p.value for p in parts if isinstance(p, ast.Constant)]
            said |= {text + "…" if isinstance(reason, ast.JoinedStr) else text for text in constant}
    return said


def test_every_reason_has_a_cause_and_a_remedy() -> None:
    assert set(remedies.PAGE) == _said(scrape, fetch, iterations)
    assert set(remedies.LOG) == set(typing.get_args(chunks.Reason))
    assert set(remedies.GPU) == set(typing.get_args(nvml.Reason))
    assert set(remedies.SERVICE) == _said(fetch, services)


def test_symptoms_that_the_doctor_tells_read_as_here() -> None:
    told = (remedies.MODEL_UNKNOWN, remedies.METRIC_MISSING, remedies.UNPARSED, remedies.UNMATCHED)
    assert [advice for advice in told if f" | {advice.cause} | {advice.remedy} |\n" not in readme()] == []


# what is named exists


def test_every_metric_named_is_in_the_catalog() -> None:
    known = {f.name for f in catalog.FAMILIES}
    known |= {f.name + end for f in catalog.FAMILIES if f.kind == "histogram" for end in ("_bucket", "_sum", "_count")}
    known |= set(re.findall(r"(?m)^# TYPE (stopline_ramp_\w+)", (ROOT / "tests/golden/ramp.prom").read_text()))
    text = readme().replace("stopline_`", "")  # the prefix itself
    assert set(re.findall(r"stopline_\w+", text)) - known == set()


def test_every_setting_named_exists() -> None:
    sections = "|".join(f.name for f in fields(Config))
    named = set(re.findall(rf"`((?:{sections})\.[a-z_]+)`", readme()))
    assert named
    assert named <= {key for key, *_ in settings()}


def test_every_command_and_flag_named_exists() -> None:
    commands = cli.main.commands
    assert set(re.findall(r"(?m)(?:`|^)stopline ([a-z]+)", readme())) == set(commands)
    for line in re.findall(r"stopline (?:run|demo|check|ramp|compare) [^\n`]*", readme()):
        command = commands[line.split()[1]]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w.-]*", line)) <= known, line


def test_every_flag_and_variable_of_run_is_in_its_table() -> None:
    table = between("table: flags")
    for parameter in cli.main.commands["run"].params:
        assert all(f"`{name}`" in table for name in (*parameter.opts, parameter.envvar))


def test_every_make_target_named_exists() -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    named = set(re.findall(r"(?m)(?:`|^)make ([a-z-]+)", readme()))
    assert {"run", "test"} <= named <= targets


def test_every_link_leads_somewhere() -> None:
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```$", "", readme()))
    anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
    for target in re.findall(r"\]\((?!https://)([^)]+)\)", readme()):
        assert target.removeprefix("#") in anchors if target.startswith("#") else (ROOT / target).exists(), target


def test_every_path_named_exists() -> None:
    named = re.findall(r"`((?:exporter|tests|engines)/[\w./-]+)`", readme())
    assert named
    for path in named:
        assert (ROOT / path).exists() or (ROOT / "exporter" / path).exists(), path


def test_what_is_quoted_of_the_demo_is_what_it_prints() -> None:
    lines = [line for line in example("demo").splitlines() if line]
    acts = [act.says for act in demo.ACTS]
    titles = [line for line in lines if not line.startswith(" ")]
    assert titles == acts[: len(titles)]
    assert lines.count(demo._HEADER) == len(titles)
    assert {len(line.split("  STOP")[0]) for line in lines if line.startswith("  ")} == {len(demo._HEADER)}


# the examples work


def test_the_settings_example_is_sound(tmp_path: Path) -> None:
    loaded = settings_of("settings", tmp_path)
    assert loaded.warnings() == []
    assert loaded.thresholds.memory_headroom_bytes == 2 << 30


def test_the_example_of_a_kustomization_and_its_settings_are_rendered(tmp_path: Path) -> None:
    text = example("kustomization")
    for path in re.findall(r"stopline/(deploy/\S+)", text):
        if (ROOT / path).is_file():  # must lie below
            (tmp_path / "stopline" / path).parent.mkdir(parents=True)
            shutil.copy(ROOT / path, tmp_path / "stopline" / path)
        else:
            text = text.replace(f"stopline/{path}", os.path.relpath(ROOT / path, tmp_path.resolve()))
    (tmp_path / "kustomization.yaml").write_text(text + "patches: [{path: settings.yaml}]\n")
    (tmp_path / "settings.yaml").write_text(example("settings patch"))
    shutil.copy(ROOT / "deploy/kustomize/examples/sglang/server.yaml", tmp_path)
    rendered = manifests.parsed(manifests.kustomize(tmp_path))
    kinds = {m["kind"]: m for m in rendered}
    assert set(kinds) == {"ConfigMap", "PodMonitor", "StatefulSet"}
    assert kinds["PodMonitor"]["metadata"]["labels"] == {"release": "kps"}
    assert "30000" in kinds["ConfigMap"]["data"]["stopline.yml"]
    assert {m["metadata"]["namespace"] for m in rendered} == {"ml"}
    (pod,) = manifests.pods(rendered)
    assert manifests.containers(pod)["stopline"]["image"] == f"registry.example.com/stopline:{__version__}"


def test_every_component_named_exists() -> None:
    named = re.findall(r"(?m)^\| `([a-z-]+)`(?: after the sidecar's component)? \|", readme())
    components = {p.parent.name for p in (ROOT / "deploy/kustomize").glob("*/kustomization.yaml")}
    assert {"sidecar", "gpu-dra"} <= set(named) & components
    assert set(named) & {n for n in named if n.startswith(("sidecar", "gpu", "leader"))} <= components


def test_the_example_of_tls_and_passwords_is_sound(tmp_path: Path) -> None:
    text = example("web file")
    assert strictyaml.parse(text, webfile.WebFile, "web.yml").basic_auth_users
    told = text.replace("  # client", "  client")
    assert strictyaml.parse(told, webfile.WebFile, "web.yml").tls_server_config.client_ca_file == Path("ca.crt")


def test_the_example_of_pins_is_sound(tmp_path: Path) -> None:
    (tmp_path / "measured.yaml").write_text(example("pins file"))
    pins = settings_of("pins", tmp_path).pins()
    assert [(pin.signal, pin.seconds) for pin in pins] == [("request", 2.4), ("queue_wait", 0.02), ("request", 2.4)]


def test_the_line_with_known_fields_needs_no_settings() -> None:
    told = Reader("generic").feed(example("known fields line")).told()
    assert told == pytest.approx(
        {
            "request_queue_wait_seconds{model=}": 0.0123,
            "step_latency_seconds{model=,phase=mixed}": 0.0456,
            "request_latency_seconds{model=}": 0.0579,
            "requests_total{model=,outcome=ok}": 1,
        }
    )


def test_the_field_of_your_own_is_read_as_the_text_says(tmp_path: Path) -> None:
    fields = settings_of("own field", tmp_path).log.fields
    assert "`rid=5 t_sched=12300` is a wait of 12.3 ms" in readme()
    told = Reader("generic", fields=fields).feed("rid=5 t_sched=12300").told()
    assert told == {"request_queue_wait_seconds{model=}": pytest.approx(0.0123)}


def test_the_pattern_of_your_own_keeps_its_samples(tmp_path: Path) -> None:
    loaded = settings_of("own pattern", tmp_path)
    assert loaded.warnings() == []
    (pattern,) = loaded.log.patterns
    _keeps_its_samples(pattern, lambda: Reader(loaded.engine.name, patterns=loaded.log.patterns))


def test_the_pair_of_your_own_gives_the_time_between(tmp_path: Path) -> None:
    patterns = settings_of("own pair", tmp_path).log.patterns
    told = Reader("generic", patterns=patterns).feed(example("own pair lines")).told()
    assert told == {"request_latency_seconds{model=}": 2.5, "requests_total{model=,outcome=ok}": 1}


def _keeps_its_samples(pattern: Pattern, reader: Callable[[], Reader]) -> None:
    for sample in pattern.samples:
        told = reader().feed(sample.line).told()
        assert {k: told.get(k) for k in sample.gives} == pytest.approx(sample.gives)
    for line in pattern.rejects:
        assert reader().feed(line).lines._matched(pattern.name) == 0


@pytest.fixture
def acme(tmp_path: Path) -> Path:
    path = tmp_path / "acme.yaml"
    path.write_text(example("profile"))
    return path


def test_the_profile_keeps_its_samples_and_its_errors(acme: Path) -> None:
    profile = profiles.load(acme)
    for pattern in profile.log.patterns:
        _keeps_its_samples(pattern, lambda: Reader(profile))
    for sample in profile.log.errors.samples:
        assert Reader(profile).feed(sample.lines).settle().errors == dict.fromkeys(sample.kinds, 1)
    assert any(regex.search(example("log")) for regex in profile.detect.log)


def test_check_accepts_the_profile_and_tells_a_mistake_in_it(acme: Path, tmp_path: Path) -> None:
    path = tmp_path / "stopline.yml"
    path.write_text(f"engine: {{profile: {acme}, url: 'http://127.0.0.1:8000'}}\n")
    assert CliRunner().invoke(cli.main, ["check", "-c", str(path)]).output == f"{path}: ok\n"
    acme.write_text(example("profile").replace("unit: ms", "unit: msec"))
    result = CliRunner().invoke(cli.main, ["check", "-c", str(path)])
    assert (result.exit_code, result.stderr.count(f"{acme}:")) == (2, 1)


async def test_the_profile_makes_of_its_page_and_log_what_the_text_says(acme: Path, tmp_path: Path) -> None:
    """The engine starts and its counters are 0; then comes what the examples show."""
    start, rest = example("log").splitlines(keepends=True)[:2], example("log").splitlines(keepends=True)[2:]
    idle = re.sub(r"(?m) [\d.]+$", " 0", example("page"))
    steps = [([], idle), (start, idle), (rest, example("page"))]
    served = [""]

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=served[-1])

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    log = tmp_path / "server.log"
    log.touch()
    clock = Clock()
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        sidecar = Sidecar(
            Config(
                engine=EngineConfig(url=str(server.make_url("/")), profile=acme),
                log=LogConfig(paths=(str(log),)),
                gpus=GpuConfig(devices="none"),
            ),
            clock=clock,
        )
        sources = sidecar.build(session)
        for lines, page in (*steps, ([], example("page"))):  # at last nothing new: an error is judged by time
            served.append(page)
            with log.open("a") as file:
                file.writelines(lines)
            for source in sources.values():
                await source.once()
            clock.pass_(5.0)
    told = generate_latest(sidecar.registry).decode().splitlines()
    assert [line for line in example("result").splitlines() if line not in told] == []


def test_every_yaml_block_has_a_name_by_which_it_is_tested_here() -> None:
    named = re.findall(r"<!-- example: (.+) -->\n```yaml", readme())
    assert len(named) == readme().count("```yaml")
    assert [name for name in named if f'"{name}"' not in Path(__file__).read_text()] == []


@pytest.mark.parametrize("block", re.findall(r"(?ms)^```(?:ba)?sh\n(.*?)^```$", readme()))
def test_every_shell_block_is_shell(block: str) -> None:
    assert subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=True).stderr == ""


def test_the_server_behind_tee_keeps_its_outputs_and_its_exit_status(tmp_path: Path) -> None:
    server, log = tmp_path / "vllm", tmp_path / "server.log"
    server.write_text("#!/bin/sh\necho to stdout\necho to stderr >&2\nexit 3\n")
    server.chmod(0o755)
    script = example("tee").replace("/var/log/vllm/server.log", str(log))
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert (result.returncode, result.stdout) == (3, "to stdout\nto stderr\n")
    assert log.read_text() == "to stdout\nto stderr\n"


def _promtool(*arguments: str | Path) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: apt-get install prometheus"
    result = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_prometheus_takes_the_scrape_config_and_the_queries(tmp_path: Path) -> None:
    scrape_config, rules = tmp_path / "prometheus.yml", tmp_path / "rules.yml"
    scrape_config.write_text(example("rule files") + example("scrape config"))
    _promtool("check", "config", scrape_config)
    queries = [line for line in example("promql").splitlines() if line and not line.startswith("#")]
    rules.write_text(
        "groups:\n  - name: readme\n    rules:\n"
        + "".join(f"      - {{record: 'readme:{n}', expr: '{query}'}}\n" for n, query in enumerate(queries))
    )
    _promtool("check", "rules", rules)
