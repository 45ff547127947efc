"""`stopline ramp` and `stopline compare` on the command line."""

import asyncio
import contextlib
import math
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import click

from exporter.load.result import Condition
from exporter.strictyaml import ConfigError

_T = TypeVar("_T")


class _Float(click.FloatRange):
    """A range without inf, and without nan, which no comparison would refuse."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"must be a finite number, got {value}", param, ctx)
        return number


_OVER_0 = _Float(0, min_open=True)
_FILE = click.Path(path_type=Path, dir_okay=False)
_PATIENCE = 5.0  # seconds after the first Ctrl-C until another one ends it at once
_FILES = 64  # open files that are no connection to the server
_DEFAULT_URL = "http://127.0.0.1:8000"


def _fail(problems: tuple[str, ...]) -> NoReturn:
    for problem in problems:
        click.echo(problem, err=True)
    sys.exit(2)


def _parsed(parse: Callable[[str], _T]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback that shows what *parse* says of a value, or of each of several."""

    def callback(_: click.Context, __: click.Parameter, value: Any) -> Any:
        try:
            if isinstance(value, tuple):
                return tuple(parse(one) for one in value)
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def _levels(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")):
        raise ValueError(f"must be numbers such as 1,2,4,8, got {text!r}")
    levels = tuple(int(n) for n in text.split(","))
    if levels[0] < 1 or list(levels) != sorted(set(levels)):
        raise ValueError(f"must rise and begin at 1 or above, got {text!r}")
    return levels


def _url(url: str) -> str:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not re.search(r"\s", url)
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"must start with http:// or https:// and name a host, got {url!r}")
    return url.rstrip("/")


def _lengths(text: str) -> Any:
    from exporter.load.mix import Lengths

    return Lengths.parse(text)


def _variable(text: str) -> Any:
    from exporter.load.sweep import Variable

    return Variable.parse(text)


def _pair(text: str) -> tuple[str, Condition]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not name or not equals or not value:
        raise ValueError(f"must be NAME=VALUE, got {text!r}")
    return name, int(value) if value.isdigit() else value


@click.command()
@click.option("--url", default=_DEFAULT_URL, show_default=True, callback=_parsed(_url), help="The server, or its path.")
@click.option("--api", type=click.Choice(["completions", "chat", "generate"]), help="Else by the path of --url.")
@click.option("--model", default="", help="Else the first of /v1/models.")
@click.option("--token-file", type=_FILE, help="File with a bearer token for the server.")
@click.option("--levels", default="1,2,4,8,16,32", show_default=True, callback=_parsed(_levels), help="Of concurrency.")
@click.option("--requests", default=200, show_default=True, type=click.IntRange(1), help="Measured at each level.")
@click.option("--warm-up", default=20, show_default=True, type=click.IntRange(0), help="Requests not measured.")
@click.option("--input-tokens", default="128", show_default=True, callback=_parsed(_lengths), help="N, or N-M.")
@click.option("--output-tokens", default="64", show_default=True, callback=_parsed(_lengths), help="N, or N-M.")
@click.option("--seed", default=0, show_default=True, help="Of the generated requests.")
@click.option("--body", type=_FILE, help="JSON: one request. JSON Lines: requests, or lengths of prompts and answers.")
@click.option("--template", type=_FILE, help="JSON body for /generate, with {prompt} and {output_tokens}.")
@click.option("--stream/--no-stream", default=True, show_default=True, help="Ask for a stream of tokens.")
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Ask for exactly --output-tokens.")
@click.option("--timeout", default=300.0, show_default=True, type=_OVER_0, help="Seconds until a request has failed.")
@click.option("--sidecar", callback=_parsed(_url), help="A Stopline beside the server, http://HOST:10777.")
@click.option("--reset", help="Command before each level, such as one that restarts the server.")
@click.option("--vary", "variables", multiple=True, callback=_parsed(_variable), help="NAME=V,V,…; concurrency=… too.")
@click.option("--apply", help="Command that sets the varied {value} and starts the server anew.")
@click.option("--fix", multiple=True, callback=_parsed(_pair), help="NAME=VALUE while another variable is varied.")
@click.option("--latency-ratio", type=_Float(1, min_open=True), help="P99 over its baseline.  [default: 2]")
@click.option("--latency-floor", type=_Float(0), help="Seconds P99 must rise at least.  [default: 0.05]")
@click.option("--memory-used-ratio", type=_Float(0, 1), help="Of a GPU's memory.  [default: 0.9]")
@click.option("--memory-headroom", type=_Float(0), help="GiB free at least.  [default: 1]")
@click.option("--confirm", default=2, show_default=True, type=click.IntRange(0, 10), help="Further passes in doubt.")
@click.option("--baselines", default=2, show_default=True, type=click.IntRange(1, 10), help="Passes of level one.")
@click.option("--refine/--no-refine", default=True, show_default=True, help="Search between the last two levels.")
@click.option("--precision", default=0.1, show_default=True, type=_Float(0, 1), help="Where that may end.")
@click.option("--pause", default=1.0, show_default=True, type=_Float(0), help="Seconds between two levels.")
@click.option("--ready-seconds", default=600.0, show_default=True, type=_OVER_0, help="For a server to come back.")
@click.option("--max-seconds", default=3600.0, show_default=True, type=_OVER_0, help="For all of it.")
@click.option("--max-requests", default=20_000, show_default=True, type=click.IntRange(1), help="About so many in all.")
@click.option("--condition", multiple=True, callback=_parsed(_pair), help="NAME=VALUE that the server does not tell.")
@click.option("--out", type=_FILE, help="Result file (JSON), for stopline compare.")
@click.option("--pin", type=_FILE, help="The baseline as pins of the sidecar (YAML).")
@click.option("--textfile", type=_FILE, help="The verdict as metrics, for node_exporter's textfile collector.")
@click.option("--picture", type=_FILE, help="The curve as SVG.")
@click.option("--markdown", is_flag=True, help="The table in Markdown.")
@click.option("--json", "as_json", is_flag=True, help="The result file on standard output.")
def ramp(**given: Any) -> None:
    """Find how much concurrency a server carries: rising closed-loop load until a stop line trips.

    P99 at twice that of the first level, an error, or GPU memory near its limit end it. Exit 0 if all levels were
    under the lines, 1 if a line tripped or not all levels were made, 2 for wrong usage.
    """
    try:
        sys.exit(asyncio.run(_interruptible(lambda stop: _ramp(given, stop))))
    except ConfigError as error:
        _fail(error.problems)
    except OSError as error:
        _fail((f"{error.filename or 'a file'}: {error.strerror or error}",))


async def _interruptible(work: Callable[[asyncio.Event], Coroutine[Any, Any, int]]) -> int:
    """*work* with an event that the first Ctrl-C, or SIGTERM, sets.

    Further ones are ignored for a while, so that a hasty second one loses no file; a later one ends *work* at its next
    await, and files are written without any.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    task = asyncio.ensure_future(work(stop))
    patient_until = math.inf

    def end() -> None:
        nonlocal patient_until
        if not stop.is_set():
            stop.set()
            patient_until = loop.time() + _PATIENCE
        elif loop.time() > patient_until:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    try:
        return await task
    except asyncio.CancelledError:
        click.echo("ended at once, without a result", err=True)
        return 1


async def _ramp(given: dict[str, Any], stop: asyncio.Event) -> int:
    from exporter.load import pin, report, result, table, textfile
    from exporter.load.bench import Bench
    from exporter.load.live import Live
    from exporter.load.ramp import ramp
    from exporter.load.verdict import Search

    _writable(*(given[name] for name in ("out", "pin", "textfile", "picture")))
    if given["variables"] and (lost := [name for name in ("pin", "textfile", "picture") if given[name]]):
        raise ConfigError([f"--{lost[0]}: --vary looks for no limit and has none to write; leave it out, or use --out"])
    _affordable(given)
    plan = _plan(given)
    layout = table.markdown if given["markdown"] else table.text
    async with Bench(plan, Live(sys.stderr), stop) as bench:
        if given["variables"]:
            return await _sweep(bench, given, layout)
        search = Search(
            given["levels"],
            confirmations=given["confirm"],
            baselines=given["baselines"],
            precision=given["precision"],
            refine=given["refine"],
        )
        run = await ramp(bench, search)
    file = result.File(result.VERSION, [run])
    for line in [result.encode(file).decode()] if given["as_json"] else report.ramp(run, layout):
        click.echo(line)
    with _kept() as keep:
        if given["out"]:
            keep(given["out"], lambda: result.write(given["out"], file))
        if given["pin"]:
            keep(given["pin"], lambda: pin.write(given["pin"], run))
            if why := pin.unfit(run):
                click.echo(f"{given['pin']}: no pins are written, what is there stays: {why}", err=True)
        if given["textfile"]:
            keep(given["textfile"], lambda: textfile.write(given["textfile"], run))
        if given["picture"]:
            from exporter.load import picture

            keep(given["picture"], lambda: given["picture"].write_text(picture.of_ramp(run), encoding="utf-8"))
    assert run.verdict is not None
    return 0 if run.verdict.finished and run.verdict.tripped is None else 1


async def _sweep(bench: Any, given: dict[str, Any], layout: Any) -> int:
    from exporter.load import report, result
    from exporter.load.sweep import CONCURRENCY, sweep

    fixed = dict(given["fix"])
    others = [variable.name for variable in given["variables"] if variable.name != CONCURRENCY]
    if others and given["apply"] is None:
        raise ConfigError([f"--vary {others[0]} needs --apply: a command that sets {others[0]} to {{value}}"])
    if given["apply"] is not None and "{value}" not in given["apply"]:
        raise ConfigError(["--apply must hold {value}, which each value takes the place of"])
    concurrency = int(fixed.get(CONCURRENCY, 1))
    runs = await sweep(bench, given["variables"], command=given["apply"], concurrency=concurrency, fixed=fixed)
    file = result.File(result.VERSION, runs, [variable.name for variable in given["variables"]])
    if given["as_json"]:
        click.echo(result.encode(file).decode())
    else:
        for line in report.sweep(file, layout):
            click.echo(line)
        for note in dict.fromkeys(bench.notes):
            click.echo(f"note: {note}")
    if given["out"]:
        with _kept() as keep:
            keep(given["out"], lambda: result.write(given["out"], file))
    return 0 if len(runs) == sum(len(v.values) for v in given["variables"]) else 1


def _plan(given: dict[str, Any]) -> Any:
    """Raises ConfigError."""
    from exporter.load import mix as mixes
    from exporter.load.bench import Plan
    from exporter.load.client import Target

    url, api = given["url"], given["api"]
    path = urlsplit(url).path.rstrip("/")
    if api is None:
        api = next((name for name, p in mixes.PATHS.items() if path.endswith(p)), "completions")
    if path in ("", "/v1"):
        url = url.removesuffix("/v1") + mixes.PATHS[api]
    headers = {}
    if given["token_file"]:
        try:
            headers["Authorization"] = f"Bearer {given['token_file'].read_text().strip()}"
        except OSError as error:
            raise ConfigError([f"{given['token_file']}: cannot be read: {error.strerror}"]) from None
    fields: dict[str, Any] = mixes.from_file(given["body"]) if given["body"] else {}
    if given["template"]:
        if api != "generate":
            raise ConfigError(["--template is for --api generate; the other APIs know their body"])
        fields["template"] = mixes.template(given["template"])
    stream = given["stream"]
    if fields.get("given"):
        stream = mixes.streams(fields["given"][0])
    mix = mixes.Mix(
        api=api,
        model=given["model"],
        stream=stream,
        input_tokens=given["input_tokens"],
        output_tokens=given["output_tokens"],
        seed=given["seed"],
        ignore_eos=given["ignore_eos"],
        **fields,
    )
    limits = {
        "latency_ratio": given["latency_ratio"],
        "latency_floor_seconds": given["latency_floor"],
        "memory_used_ratio": given["memory_used_ratio"],
        "memory_headroom_bytes": None if given["memory_headroom"] is None else given["memory_headroom"] * 2**30,
    }
    return Plan(
        target=Target(url, headers, given["timeout"]),
        mix=mix,
        requests=given["requests"],
        warm_up=given["warm_up"],
        pause=given["pause"],
        sidecar=given["sidecar"],
        reset=given["reset"],
        ready_seconds=given["ready_seconds"],
        max_seconds=given["max_seconds"],
        max_requests=given["max_requests"],
        conditions=dict(given["condition"]),
        limits={name: value for name, value in limits.items() if value is not None},
    )


def _writable(*paths: Path | None) -> None:
    """Before an hour of load, and not after it. Raises ConfigError."""
    seen: set[Path] = set()
    for path in paths:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise ConfigError([f"{path}: there is no directory {path.parent}"])
        try:
            with tempfile.TemporaryFile(dir=path.parent, buffering=0) as trial:  # which tells of a full disk too
                trial.write(b"\n")
        except OSError as error:
            why = error.strerror or error
            raise ConfigError([f"{path}: cannot be written: {why}; choose another directory"]) from None
        if path.resolve() in seen:
            raise ConfigError([f"{path}: is given for two files, one of which would be lost; name another"])
        seen.add(path.resolve())


@contextlib.contextmanager
def _kept() -> Iterator[Callable[[Path, Callable[[], object]], None]]:
    """Writes files, each whatever becomes of the others. Raises ConfigError at the end, naming those that failed."""
    problems: list[str] = []

    def keep(path: Path, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            problems.append(f"{path}: not written: {error.strerror or error}")

    yield keep
    if problems:
        raise ConfigError(problems)


def _affordable(given: dict[str, Any]) -> None:
    """Each client of a level has a connection and a request at least. Raises ConfigError."""
    from exporter.load.sweep import CONCURRENCY

    if given["warm_up"] > given["max_requests"]:
        raise ConfigError([f"--warm-up: {given['warm_up']} is more than --max-requests {given['max_requests']}"])
    highest, option = max(given["levels"]), "--levels"
    if given["variables"]:
        values = [n for v in given["variables"] if v.name == CONCURRENCY for n in v.values]
        fixed = dict(given["fix"]).get(CONCURRENCY, 1)
        if not isinstance(fixed, int) or fixed < 1:
            raise ConfigError([f"--fix {CONCURRENCY} must be a whole number above 0, got {fixed!r}"])
        highest = max(map(int, (*values, fixed)))
        option = f"{'--vary' if highest in values else '--fix'} {CONCURRENCY}"
    if highest > given["max_requests"]:
        raise ConfigError(
            [f"{option}: {highest} clients make more requests than --max-requests {given['max_requests']}"]
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and highest > files - _FILES:
        raise ConfigError(
            [f"{option}: {highest} clients need as many open files, and no more than {files} are allowed: ulimit -n"]
        )


@click.command()
@click.argument("results", nargs=-1, required=True)
@click.option("--concurrency", type=click.IntRange(1), help="Level compared; else the highest that all have.")
@click.option("--ignore", multiple=True, help="A condition that may differ as well; repeatable.")
@click.option("--min-gain", type=_Float(0), default=0.2, show_default=True, help="ΔT below is no gain.")
@click.option("--max-p99-rise", type=_Float(0), default=0.1, show_default=True, help="ΔP99 is too much.")
@click.option("--memory-ratio", type=_Float(0, 1), default=0.9, show_default=True, help="Of a GPU's memory.")
@click.option("--max-communication", type=_Float(0, 1), default=0.5, show_default=True, help="Of a step.")
@click.option("--picture", type=_FILE, help="The curve as SVG.")
@click.option("--markdown", is_flag=True, help="The table in Markdown.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def compare(
    results: tuple[str, ...],
    concurrency: int | None,
    ignore: tuple[str, ...],
    min_gain: float,
    max_p99_rise: float,
    memory_ratio: float,
    max_communication: float,
    picture: Path | None,
    markdown: bool,
    as_json: bool,
) -> None:
    """Put runs that differ in one variable beside each other, and say where to stop and by which column.

    RESULTS are files of stopline ramp, of hey (text or CSV), vllm bench serve, GuideLLM or AIPerf (JSON). What another
    tool does not tell stands behind its name: hey.txt@parallelism=2,concurrency=8. Exit 0 if every step pays, 1 if one
    does not, 2 for wrong usage or runs that differ in more than one variable.
    """
    from exporter.load import compare as comparing
    from exporter.load import imports, report, result, table

    try:
        _writable(picture)
        imports.different(results)
        runs = [named for name in results for named in imports.read(name)]
        rules = comparing.Rules(memory_ratio, min_gain, max_p99_rise, max_communication)
        found = comparing.compare(runs, rules, concurrency=concurrency, ignore=ignore)
        if picture is not None:
            from exporter.load import picture as pictures

            picture.write_text(pictures.of_comparison(found), encoding="utf-8")
    except ConfigError as error:
        _fail(error.problems)
    except OSError as error:
        _fail((f"{error.filename or 'a file'}: {error.strerror or error}",))
    if as_json:
        click.echo(result.encode(comparing.as_json(found)).decode())
    else:
        for line in report.comparison(found, table.markdown if markdown else table.text):
            click.echo(line)
    sys.exit(0 if found.stay is None else 1)
