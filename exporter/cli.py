"""The commands: what is on the command line and in the environment becomes settings; exit codes.

0 good, 1 a bug ended it or a verdict is no, 2 usage or settings.
"""

import asyncio
import dataclasses
import errno
import logging
import math
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import msgspec

from exporter import __version__
from exporter import config as settings
from exporter.doctor.findings import printable
from exporter.engines import profile as profiles
from exporter.load import commands
from exporter.strictyaml import ConfigError

log = logging.getLogger(__name__)

_SHAPES = 20

_C = TypeVar("_C", bound=Callable[..., Any])


class _Json(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def set_up_logging(config: settings.LoggingConfig) -> None:
    """Log to standard error, once, as asked for."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Json()
        if config.format == "json"
        else logging.Formatter("%(asctime)s %(levelname)-7s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S%z")
    )
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)


def fail(problems: tuple[str, ...]) -> NoReturn:
    """Show what is wrong with the settings and end with 2."""
    for problem in problems:
        click.echo(problem, err=True)
    sys.exit(2)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="stopline")
def main() -> None:
    """Stopline: a Prometheus exporter that runs beside an LLM inference server."""


main.add_command(commands.ramp)
main.add_command(commands.compare)

_CONFIG = click.option(
    "-c", "--config", "path", type=click.Path(path_type=Path), envvar="STOPLINE_CONFIG", help="Settings file (YAML)."
)


_SETTINGS = (
    _CONFIG,
    click.option("--engine-url", envvar="STOPLINE_ENGINE_URL", help="Address of the server, http://HOST:PORT."),
    click.option("--engine", envvar="STOPLINE_ENGINE", help="Engine by name; else it is found out."),
    click.option("--model", envvar="STOPLINE_MODEL", help="Value of the model label; else what the engine says."),
    click.option(
        "--log", "logs", multiple=True, envvar="STOPLINE_LOG", help="Log file, pattern, - or kube:// ; repeatable."
    ),
    click.option("--gpus", envvar="STOPLINE_GPUS", help="auto, all, none, or a list: 0,1 or UUIDs."),
    click.option(
        "--web.listen-address", "listen", envvar="STOPLINE_WEB_LISTEN_ADDRESS", help="[HOST]:PORT to answer on."
    ),
    click.option(
        "--web.config.file",
        "web_file",
        type=click.Path(path_type=Path),
        envvar="STOPLINE_WEB_CONFIG_FILE",
        help="File with TLS and passwords.",
    ),
    click.option(
        "--pin",
        "pins",
        multiple=True,
        type=click.Path(path_type=Path),
        envvar="STOPLINE_PIN",
        help="File with pinned baselines; repeatable.",
    ),
    click.option(
        "--state-dir", type=click.Path(path_type=Path), envvar="STOPLINE_STATE_DIR", help="Kept over restarts."
    ),
    click.option("--log.level", "level", envvar="STOPLINE_LOG_LEVEL", help="debug, info, warning or error."),
    click.option("--log.format", "format", envvar="STOPLINE_LOG_FORMAT", help="text or json."),
)


def _with_settings(command: _C) -> _C:
    """*command* with the options from which the sidecar's settings come."""
    for option in reversed(_SETTINGS):
        command = option(command)
    return command


@main.command()
@_with_settings
def run(path: Path | None, **flags: Any) -> None:
    """Run the sidecar: tail the log, scrape the engine, read the GPUs, answer /metrics."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the sidecar has its own
    overrides = _overrides(**flags)
    config = _load(path, overrides)
    set_up_logging(config.logging)
    for warning in config.warnings():
        log.warning("%s", warning)
    from exporter.sidecar import Sidecar, until_signalled  # what check and --help need not load

    _guard(lambda: asyncio.run(until_signalled(Sidecar(config, path=path, overrides=overrides))), config)


@main.command()
@_CONFIG
def check(path: Path | None) -> None:
    """Validate the settings and the profiles, samples included; exit 0 or 2."""
    try:
        from exporter import webfile

        config = settings.load(path)
        for engine in profiles.names():
            profiles.bundled(engine)
        profiles.shared()
        webfile.load(config.web.config_file)
        if problems := tuple(_proved(config, path)):
            raise ConfigError(problems)
    except ConfigError as error:
        fail(error.problems)
    for warning in config.warnings():
        click.echo(f"{path or 'defaults'}: warning: {warning}", err=True)
    click.echo(f"{path or 'defaults'}: ok")


@main.command()
@click.option("--web.listen-address", "listen", default="127.0.0.1:10777", help="[HOST]:PORT to answer on.")
@click.option("--engine-port", default=0, help="Port of the simulated server; 0 takes a free one.")
@click.option("--seed", default=1, help="Seed of the simulated load.")
def demo(listen: str, engine_port: int, seed: int) -> None:
    """Show it all without an engine or a GPU: a simulated server, the sidecar, and load that rises."""
    from exporter.demo import show

    config = settings.load(None, {"web": {"listen_address": listen}})
    set_up_logging(settings.LoggingConfig(level="warning"))
    _guard(lambda: asyncio.run(show(config, engine_port=engine_port, seed=seed)), config)


def _address(_: click.Context, option: click.Parameter, url: str | None) -> str | None:
    if url is not None and not re.match(r"https?://[^/\s]+", url):
        raise click.BadParameter(f"must start with http:// or https:// and name a host, got {url!r}")
    return url


@main.command()
@_with_settings
@click.option("--prometheus", metavar="URL", callback=_address, help="A Prometheus that should scrape Stopline.")
@click.option("--prometheus-token-file", type=click.Path(path_type=Path), help="File with a token for it.")
@click.option("--grafana", metavar="URL", callback=_address, help="A Grafana that should have the boards.")
@click.option("--grafana-token-file", type=click.Path(path_type=Path), help="File with a token for it.")
@click.option(
    "--seconds", type=click.FloatRange(0.1, 3600), default=5.0, show_default=True, help="How long it watches."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def doctor(
    path: Path | None,
    prometheus: str | None,
    prometheus_token_file: Path | None,
    grafana: str | None,
    grafana_token_file: Path | None,
    seconds: float,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show whether it is set up right: what each source tells, with the remedy where one does not.

    Takes the settings of run, also while that is running. Exit 1 if a stop line cannot be judged.
    """
    if math.isnan(seconds):
        fail(("--seconds must be a number, got nan",))
    config = _load(path, _overrides(**flags))
    set_up_logging(config.logging if flags["level"] else settings.LoggingConfig(level="error"))
    from exporter.doctor.examine import examine
    from exporter.doctor.services import Service

    look = examine(
        config,
        seconds=seconds,
        prometheus=Service(prometheus, prometheus_token_file) if prometheus else None,
        grafana=Service(grafana, grafana_token_file) if grafana else None,
    )
    try:
        report = asyncio.run(look)
    except ConfigError as error:
        fail(error.problems)
    for line in [msgspec.json.encode(report)] if as_json else report.as_text():
        click.echo(line)
    sys.exit(report.exit_code)


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@_CONFIG
@click.option("--engine", help="Read as this engine's; else found out from each file.")
@click.option("--totals", is_flag=True, help="Totals and unmatched shapes only, not each line.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each line.")
@click.option("--write-mapping", is_flag=True, help="Print settings drafted from the fields of an unknown log.")
def explain(
    files: tuple[Path, ...], path: Path | None, engine: str | None, totals: bool, as_json: bool, write_mapping: bool
) -> None:
    """Show what each line of a log, or each metric of a page, becomes, and why.

    With settings, read by their profile, patterns and fields.
    """
    from exporter import draft
    from exporter import explain as explaining

    if engine is not None and engine not in profiles.names():
        fail((f"--engine must be one of {', '.join(profiles.names())}, got {engine!r}",))
    if write_mapping:
        text = "\n".join(map(explaining.read, files))
        click.echo(draft.mapping(text) or f"# {files[0]}: no field looks like a signal\n", nl=False)
        return
    config = _load(path, {})
    own = {"patterns": config.log.patterns, "fields": config.log.fields, "window": config.log.collapse}
    for file in files:
        text = explaining.read(file)
        named = profiles.bundled(engine) if engine else config.profile()
        profile = named or profiles.bundled(explaining.engine_of(text))
        told = explaining.page(text, profile) if explaining.is_page(text) else explaining.log(text, profile, **own)
        if as_json:
            for item in told:
                click.echo(msgspec.json.encode({"file": str(file)} | dataclasses.asdict(item)))
            continue
        click.echo(f"{file}: read as {profile.engine}")
        if not totals:
            for item in told:
                click.echo(f"{item.number:6} {printable(item.text)[:100]}")
                click.echo(f"       -> {'; '.join(item.became) or item.why}")
        became, useless = sum(bool(t.became) for t in told), sum(t.why == explaining.IGNORED for t in told)
        click.echo(
            f"{file}: {became} of {len(told)} became something" + (f", {useless} are of no use" if useless else "")
        )
        shapes = explaining.shapes(told).most_common()
        for shape, count in shapes[:_SHAPES]:
            click.echo(f"  unmatched {count:6} x {printable(shape)}")
        if rest := shapes[_SHAPES:]:
            click.echo(f"  unmatched {sum(n for _, n in rest):6} of {len(rest)} further shapes")


def _load(path: Path | None, overrides: dict[str, dict[str, Any]]) -> settings.Config:
    """The settings; ends with 2 if they are wrong."""
    try:
        return settings.load(path, overrides)
    except ConfigError as error:
        fail(error.problems)


def _proved(config: settings.Config, path: Path | None) -> Iterator[str]:
    """What the samples show to be wrong in what the user wrote: a profile, and patterns of the settings."""
    from exporter import verify

    profile = config.profile() or profiles.bundled(profiles.GENERIC)
    if config.engine.profile is not None:
        wrong = (*verify.patterns(profile), *verify.errors(profile, profile.log.errors.samples))
        yield from (f"{config.engine.profile}: {problem}" for problem in wrong)
    wrong = tuple(verify.patterns(verify.with_patterns(profile, config.log.patterns), config.log.patterns))
    yield from (f"{path}: {problem}" for problem in wrong)


def _overrides(**flags: Any) -> dict[str, dict[str, Any]]:
    """The flags that were given, by section and key of the settings."""
    gpus = flags["gpus"]
    if gpus is not None and gpus not in ("auto", "all", "none"):
        gpus = tuple(part.strip() for part in gpus.split(","))
    given: dict[str, dict[str, Any]] = {
        "engine": {"url": flags["engine_url"], "name": flags["engine"], "model": flags["model"]},
        "log": {"paths": flags["logs"] or None},
        "gpus": {"devices": gpus},
        "baseline": {"files": flags["pins"] or None},
        "web": {"listen_address": flags["listen"], "config_file": flags["web_file"]},
        "logging": {"level": flags["level"], "format": flags["format"]},
        "": {"state_dir": flags["state_dir"]},
    }
    sections = {s: {k: v for k, v in values.items() if v is not None} for s, values in given.items()}
    return {section: values for section, values in sections.items() if values}


def _guard(start: Any, config: settings.Config) -> None:
    """Run *start*; what a user can mend ends with one line and 2, a bug with its traceback and 1."""
    try:
        start()
    except (ConfigError, SystemExit) as error:
        if isinstance(error, ConfigError):
            fail(error.problems)
        raise
    except BaseException as error:
        address = config.web.listen_address
        if _reader_left(error):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            fail((f"web.listen_address {address}: already in use; stop what listens there or choose another",))
        if isinstance(error, socket.gaierror) or getattr(error, "errno", None) in (errno.EACCES, errno.EADDRNOTAVAIL):
            fail((f"web.listen_address {address}: {getattr(error, 'strerror', '')}",))
        log.critical("stopped by a bug", exc_info=True)
        sys.exit(1)


def _reader_left(error: BaseException) -> bool:
    """Whether all that went wrong is that nobody reads our output any more, as in ``stopline demo | head``."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(BrokenPipeError)[1] is None
    return isinstance(error, BrokenPipeError)
