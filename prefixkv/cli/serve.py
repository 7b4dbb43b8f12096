"""Commands `prefixkv worker`, `prefixkv serve` and `prefixkv proxy`. Their options are the settings
of `prefixkv.serving`."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from prefixkv.serving import check_extra, is_there
from prefixkv.serving.config import KINDS, ProxyConfig, ServeConfig, ServerAt
from prefixkv.serving.settings import (
    Setting,
    flatten,
    load,
    read_toml,
    settings_of,
)
from prefixkv.spi import ConfigError

TABLE: Final = "workers"
"""Table of a file for `serve`: [workers.prefill] and [workers.decode] hold settings of workers."""


def add_commands(app: typer.Typer) -> None:
    """Add the three commands to the application."""
    workers = typer.Typer(help="One prefill or decode worker, with a model of Hugging Face's.")
    for role, kind in KINDS.items():
        workers.command(role)(_command(_worker(role), settings_of(kind), _doc(role)))
    app.add_typer(workers, name="worker")
    # MODEL is the one setting that is an argument, so it is taken out of the options.
    model = Annotated[str | None, typer.Argument(help=_help_of("model", ServeConfig))]
    settings = [one for one in settings_of(ServeConfig) if one.name != "model"]
    app.command("serve")(_command(_serve, settings, _serve.__doc__ or "", model=model))
    servers = {
        role: Annotated[
            list[str] | None,
            typer.Option(f"--{role}", metavar=f"URL={what}", help=f"A {role} server; repeat it."),
        ]
        for role, what in (("prefill", "ADDRESS"), ("decode", "NAME"))
    }
    settings = settings_of(ProxyConfig)
    app.command("proxy")(_command(_proxy, settings, _proxy.__doc__ or "", **servers))


def _doc(role: str) -> str:
    """Return the help text of `prefixkv worker ROLE`."""
    return (
        f"One {role} worker as a process. Every setting is an option here, in the file, and a "
        "variable PREFIXKV_... of the environment. It drains on SIGTERM; a second one ends it."
    )


def _worker(role: str) -> Callable[..., int]:
    """Return the function that runs a worker of this role."""

    def run(config: Path | None, **options: Any) -> int:
        check_packages()
        loaded: Any = load(KINDS[role], config, os.environ, options)
        # Imported after the settings are checked: it loads the worker's modules.
        from prefixkv.serving.process import run_worker

        return run_worker(loaded)

    return run


def _serve(config: Path | None, **options: Any) -> int:
    """Serve OpenAI's API on this machine: prefill workers, decode workers and a front.

    Without MODEL, a small model with random weights answers, in words without meaning.
    """
    check_packages()
    tables: dict[str, dict[str, Any]] = {}
    for role, table in (read_toml(config).get(TABLE, {}) if config else {}).items():
        if role not in KINDS or not isinstance(table, dict):
            raise ConfigError(f"{config}: there is no setting {TABLE}.{role}")
        known = {one.name: one for one in settings_of(KINDS[role])}
        tables[role] = flatten(table, known, f"{config}: {TABLE}.{role}")
    loaded = load(ServeConfig, config, os.environ, options, but=(TABLE,))
    if loaded.ray and not is_there("ray"):
        raise ConfigError("--ray needs ray: pip install 'prefixkv[ray]'")
    from prefixkv.serving.launch import run_serve

    # Ray is imported only if it is asked for; the extra `serve` does not have it.
    if loaded.ray:
        from prefixkv.serving.cluster import RayLaunch

        return run_serve(loaded, tables, RayLaunch)
    return run_serve(loaded, tables)


def _proxy(
    config: Path | None, prefill: list[str] | None, decode: list[str] | None, **options: Any
) -> int:
    """Serve OpenAI's API in front of vLLM servers that run prefixkv's connector.

    A prefill server is given as its URL and the address that its connector listens on, a decode
    server as its URL and its connector's name: http://127.0.0.1:8100=tcp://127.0.0.1:14579,
    http://127.0.0.1:8200=decode-0. In a file they are the lists `prefill` and `decode`.
    """
    check_packages(with_model=False)
    tables = read_toml(config) if config else {}
    given = {"prefill": prefill, "decode": decode}
    # Servers on the command line replace those of the file, role by role.
    servers = {
        role: [ServerAt.of(text) for text in named or _texts(tables.get(role, []), role)]
        for role, named in given.items()
    }
    loaded = load(ProxyConfig, config, os.environ, options, but=tuple(given))
    from prefixkv.serving.proxy import run_proxy

    return run_proxy(loaded, servers["prefill"], servers["decode"])


def _texts(value: Any, where: str) -> list[str]:
    """Return a list of strings from a file. Raises ConfigError for anything else."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{where} is {value!r}, a list of strings is needed")
    return value


def check_packages(*, with_model: bool = True) -> None:
    """Raise ConfigError if the packages that serving needs are not installed."""
    try:
        check_extra(with_model=with_model)
    except ImportError as error:
        raise ConfigError(str(error)) from None


def _command(
    run: Callable[..., int], settings: list[Setting], doc: str, **arguments: Any
) -> Callable[..., int]:
    """Return a command that calls `run`, with an option for each setting."""

    def command(**given: Any) -> int:
        return run(**given)

    # Typer reads options from the signature, so it is made from the settings at run time. All
    # default to None: an option that is not given must not hide the file or the environment.
    file = typer.Option("--config", metavar="FILE", help="TOML.")
    parameters = [_parameter(name, kind) for name, kind in arguments.items()]
    parameters.append(_parameter("config", Annotated[Path | None, file]))
    for one in settings:
        if one.kind is dict:
            continue  # in files only
        shown = str(one.default) if one.default not in (None, "") else False
        flags = f"{one.option}/--no-{one.option[2:]}" if one.kind is bool else one.option
        option = typer.Option(flags, help=one.help, show_default=shown)
        parameters.append(_parameter(one.name, Annotated[one.kind | None, option]))
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = doc
    return command


def _parameter(name: str, kind: Any) -> Parameter:
    """Return a keyword parameter of a command, None by default."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _help_of(name: str, kind: type) -> str:
    """Return the help text of one setting."""
    return next(one.help for one in settings_of(kind) if one.name == name)
