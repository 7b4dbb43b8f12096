"""`prefixkv worker`, `prefixkv serve` and `prefixkv proxy`: their options are the settings of
`prefixkv.serving`. `--help` shows those with a description, `--help-all` the others too."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixkv.errors import ConfigError
from prefixkv.proxy.config import ProxyConfig, ServerAt
from prefixkv.serving import check_extra, is_there
from prefixkv.serving.config import KINDS, FrontConfig, ServeConfig
from prefixkv.settings import Setting, load, read_toml, settings_of


def add_commands(app: typer.Typer) -> None:
    workers = typer.Typer(help="One prefill or decode worker, with a model of Hugging Face's.")
    for role, kind in KINDS.items():
        workers.command(role)(_command(_worker(role), settings_of(kind), _doc(role)))
    app.add_typer(workers, name="worker")
    # MODEL is the one setting that is an argument, so it is taken out of the options.
    model = Annotated[str | None, typer.Argument(help=_help_of("model", ServeConfig))]
    for name, run, kind in (("serve", _serve, ServeConfig), ("front", _front, FrontConfig)):
        settings = [one for one in settings_of(kind) if one.name != "model"]
        app.command(name)(_command(run, settings, run.__doc__ or "", model=model))
    servers = {
        role: Annotated[
            list[str] | None,
            typer.Option(f"--{role}", metavar=f"URL={kind}", help=f"A {role} server; repeat it."),
        ]
        for role, kind in (("prefill", "ADDRESS"), ("decode", "NAME"))
    }
    settings = settings_of(ProxyConfig)
    app.command("proxy")(_command(_proxy, settings, _proxy.__doc__ or "", **servers))


def _doc(role: str) -> str:
    return (
        f"One {role} worker as a process. Every setting is an option, a line of the file and a "
        "variable PREFIXKV_... of the environment. The worker drains on SIGTERM; a second one ends "
        "it."
    )


def _worker(role: str) -> Callable[..., int]:
    def run(config: Path | None, **options: Any) -> int:
        check_packages()
        loaded: Any = load(KINDS[role], config, os.environ, options)
        # Imported after the settings are checked: it loads the worker's modules.
        from prefixkv.serving.process import run_worker

        return run_worker(loaded)

    return run


def _serve(config: Path | None, **options: Any) -> int:
    """Serve OpenAI's API on this machine: prefill workers, decode workers and a front.

    Without MODEL a small model made from a seed answers, in random words.
    """
    check_packages()
    loaded = load(ServeConfig, config, os.environ, options)
    if loaded.ray and not is_there("ray"):
        raise ConfigError("--ray needs ray: pip install 'prefixkv[ray]'")
    from prefixkv.serving.launch import ServeLaunch, run_front

    # Ray is imported only if it is asked for; the extra `serve` does not have it.
    if loaded.ray:
        from prefixkv.serving.cluster import RayLaunch

        return run_front(lambda: RayLaunch(loaded, _say), with_torch=True)
    return run_front(lambda: ServeLaunch(loaded, _say))


def _front(config: Path | None, **options: Any) -> int:
    """Serve OpenAI's API before prefill and decode workers that were started by hand, on any hosts.

    MODEL is the folder that the workers have; without it their model is the small one.
    """
    check_packages()
    loaded = load(FrontConfig, config, os.environ, options)
    from prefixkv.serving.launch import FrontLaunch, run_front

    return run_front(lambda: FrontLaunch(loaded, _say))


def _say(line: str) -> None:
    print(line, flush=True)


def _proxy(
    config: Path | None, prefill: list[str] | None, decode: list[str] | None, **options: Any
) -> int:
    """OpenAI-compatible proxy in front of vLLM servers that run the prefixkv connector.

    A prefill server is given as its URL and the address that its connector listens on, a decode
    server as its URL and its connector's name: http://127.0.0.1:8100=tcp://127.0.0.1:14579,
    http://127.0.0.1:8200=decode-0. In a file they are the lists `prefill` and `decode`.
    """
    check_packages(with_model=False)
    tables = read_toml(config) if config else {}
    given = {"prefill": prefill, "decode": decode}
    # Servers on the command line replace those of the file, role by role.
    servers = {
        role: [
            ServerAt.of(text, f"--{role}: " if named else f"{config}: {role}: ")
            for text in named or _texts(tables.get(role, []), f"{config}: {role}")
        ]
        for role, named in given.items()
    }
    loaded = load(ProxyConfig, config, os.environ, options, but=tuple(given))
    from prefixkv.proxy.server import run_proxy

    return run_proxy(loaded, servers["prefill"], servers["decode"])


def _texts(value: Any, where: str) -> list[str]:
    """Raises ConfigError for anything but a list of strings."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{where}: {value!r} is not a list of strings")
    return value


def check_packages(*, with_model: bool = True) -> None:
    """Raise ConfigError, for a command's one line of error, if a package is missing."""
    try:
        check_extra(with_model=with_model)
    except ImportError as error:
        raise ConfigError(str(error)) from None


def _command(
    run: Callable[..., int], settings: list[Setting], doc: str, **arguments: Any
) -> Callable[..., int]:
    def command(**given: Any) -> int:
        del given["help_all"]
        return run(**given)

    shown = [one for one in settings if not one.field.is_mapping]  # a table is set in the file

    def help_all(ctx: typer.Context, wanted: bool) -> None:
        if wanted:
            typer.echo("\n".join([ctx.get_usage(), "", *map(_line, shown)]))
            raise typer.Exit

    file = typer.Option("--config", metavar="FILE", help="Settings as TOML.")
    more = typer.Option("--help-all", is_eager=True, callback=help_all, help="Show every setting.")
    parameters = [_parameter(name, kind) for name, kind in arguments.items()]
    parameters.append(_parameter("config", Annotated[Path | None, file]))
    parameters += map(_option, shown)
    parameters.append(_parameter("help_all", Annotated[bool, more], default=False))
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = cleandoc(doc)
    return command


def _option(setting: Setting) -> Parameter:
    """Declare text that `load` converts, or a switch."""
    flag, is_switch = setting.option, _is_switch(setting)
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if is_switch else flag,
        help=_about(setting, setting.field.help),
        show_default=False,  # `_about` says it
        metavar=None if is_switch else _metavar(setting),
        hidden=not setting.field.help,
    )
    kind: Any = bool | None if is_switch else str | None
    return _parameter(setting.name, Annotated[kind, option])


def _line(setting: Setting) -> str:
    flag = setting.option
    name = f"--[no-]{flag[2:]}" if _is_switch(setting) else f"{flag} {_metavar(setting)}"
    text = f"  {name:<45} {_about(setting, setting.field.sentences)}"
    return textwrap.fill(text, 100, subsequent_indent=48 * " ", break_on_hyphens=False)


def _about(setting: Setting, text: str) -> str:
    """Describe a setting by its text, else by unit and bounds, and by its default."""
    field, default = setting.field, setting.default
    ranges = "; ".join(filter(None, (kind.range for kind in field.kinds)))
    text = text or (f"{ranges[0].upper()}{ranges[1:]}." if ranges else "")
    if default in (None, ""):
        return text
    shown = ("yes" if default else "no") if _is_switch(setting) else default
    return f"{text} Default: {shown}.".lstrip()


def _is_switch(setting: Setting) -> bool:
    return setting.field.kinds[0].base is bool


def _metavar(setting: Setting) -> str:
    return {int: "INT", float: "FLOAT"}.get(setting.field.kinds[0].base, "TEXT")


def _parameter(name: str, kind: Any, default: Any = None) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _help_of(name: str, kind: type) -> str:
    return next(one.field.help for one in settings_of(kind) if one.name == name)
