"""`prefixkv worker`, `prefixkv serve` and `prefixkv proxy`: their options are the settings of
`prefixkv.serving`. `--help` shows those with a description, `--help-all` the others too."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from prefixkv.errors import ConfigError
from prefixkv.serving import check_packages, is_there
from prefixkv.serving.config import KINDS, FrontConfig, ProxyConfig, ServeConfig, ServerAt
from prefixkv.settings import Setting, load, read_toml, settings_of


def add_commands(app: typer.Typer) -> None:
    workers = typer.Typer(help="One prefill or decode worker, with a model of Hugging Face's.")
    for role, kind in KINDS.items():
        workers.command(role)(_command(_worker, kind, _WORKER.format(role)))
    app.add_typer(workers, name="worker")
    # MODEL is the one setting that is an argument.
    about = next(one.field.help for one in settings_of(ServeConfig) if one.name == "model")
    model = Annotated[str | None, typer.Argument(help=about)]
    app.command("serve")(_command(_serve, ServeConfig, _serve.__doc__, model=model))
    app.command("front")(_command(_front, FrontConfig, _front.__doc__, model=model))
    servers = {
        role: Annotated[
            list[str] | None,
            typer.Option(f"--{role}", metavar=f"URL={kind}", help=f"A {role} server; repeat it."),
        ]
        for role, kind in (("prefill", "ADDRESS"), ("decode", "NAME"))
    }
    proxy = _command(_proxy, ProxyConfig, _proxy.__doc__, loads=False, **servers)
    app.command("proxy")(proxy)


_WORKER: Final = (
    "One {} worker as a process. Every setting is an option, a line of the file and a variable "
    "PREFIXKV_... of the environment. The worker drains on SIGTERM; a second one ends it."
)


def _worker(loaded: Any) -> int:
    # Imported after the settings are checked: it loads the worker's modules.
    from prefixkv.serving.worker import run_worker

    return run_worker(loaded)


def _serve(loaded: ServeConfig) -> int:
    """Serve OpenAI's API on this machine: prefill workers, decode workers and a front.

    Without MODEL a small model made from a seed answers, in random words.
    """
    if loaded.ray and not is_there("ray"):
        raise ConfigError("--ray needs ray: pip install 'prefixkv[ray]'")
    from prefixkv.serving.launch import ServeLaunch, run_front

    # Ray is imported only if it is asked for; the extra `serve` does not have it.
    if loaded.ray:
        from prefixkv.serving.cluster import RayLaunch

        return run_front(lambda: RayLaunch(loaded), with_torch=True)
    return run_front(lambda: ServeLaunch(loaded))


def _front(loaded: FrontConfig) -> int:
    """Serve OpenAI's API before prefill and decode workers that were started by hand, on any hosts.

    MODEL is the folder that the workers have; without it their model is the small one.
    """
    from prefixkv.serving.launch import FrontLaunch, run_front

    return run_front(lambda: FrontLaunch(loaded))


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
    servers = {}
    for role, texts in given.items():
        where = f"--{role}" if texts else f"{config}: {role}"
        texts = texts or tables.get(role, [])
        if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
            raise ConfigError(f"{where} is not a list of strings")
        servers[role] = [ServerAt.of(text, f"{where}: ") for text in texts]
    loaded = load(ProxyConfig, config, os.environ, options, but=tuple(given))
    from prefixkv.proxy.server import run_proxy

    return run_proxy(loaded, servers["prefill"], servers["decode"])


def _command(
    run: Callable[..., int], kind: type, doc: str | None, *, loads: bool = True, **arguments: Any
) -> Callable[..., int]:
    """Make a command of `arguments`, and of each setting of `kind` that is no table: tables are set
    in the file. `run` gets the `kind`; without `loads` what was given."""
    settings = [one for one in settings_of(kind) if one.name not in arguments]
    options = [_Option(one) for one in settings if not one.field.is_mapping]

    def command(help_all: bool, config: Path | None, **given: Any) -> int:
        if not loads:
            return run(config, **given)
        check_packages()
        return run(load(kind, config, os.environ, given))

    def show_all(ctx: typer.Context, wanted: bool) -> None:
        if wanted:
            typer.echo("\n".join([ctx.get_usage(), "", *(one.line for one in options)]))
            raise typer.Exit

    file = typer.Option("--config", metavar="FILE", help="Settings as TOML.")
    more = typer.Option("--help-all", is_eager=True, callback=show_all, help="Show every setting.")
    kinds = {
        **arguments, "config": Annotated[Path | None, file],
        **{one.setting.name: one.annotation for one in options},
        "help_all": Annotated[bool, more],
    }  # fmt: skip
    command.__signature__ = Signature([  # type: ignore[attr-defined]
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind,
                  default=False if name == "help_all" else None)
        for name, kind in kinds.items()
    ])  # fmt: skip
    command.__doc__ = cleandoc(doc or "")
    return command


class _Option:
    """A setting as an option: text that `load` converts, or a switch."""

    def __init__(self, setting: Setting) -> None:
        base = setting.field.kinds[0].base
        self.setting, self.is_switch = setting, base is bool
        self.metavar = {int: "INT", float: "FLOAT"}.get(base, "TEXT")

    @property
    def annotation(self) -> Any:
        flag, about = self.setting.option, self.setting.field.help
        option = typer.Option(
            f"{flag}/--no-{flag[2:]}" if self.is_switch else flag,
            help=self._about(about),
            show_default=False,  # `_about` says it
            metavar=None if self.is_switch else self.metavar,
            hidden=not about,
        )
        return Annotated[bool | None if self.is_switch else str | None, option]

    @property
    def line(self) -> str:
        flag = self.setting.option
        name = f"--[no-]{flag[2:]}" if self.is_switch else f"{flag} {self.metavar}"
        text = f"  {name:<45} {self._about(self.setting.field.sentences)}"
        return textwrap.fill(text, 100, subsequent_indent=48 * " ", break_on_hyphens=False)

    def _about(self, text: str) -> str:
        """Describe a setting by its text, else by unit and bounds, and by its default."""
        default = self.setting.default
        ranges = "; ".join(filter(None, (kind.range for kind in self.setting.field.kinds)))
        text = text or (f"{ranges[0].upper()}{ranges[1:]}." if ranges else "")
        if default in (None, ""):
            return text
        shown = ("yes" if default else "no") if self.is_switch else default
        off = f"Off; once a setting of {self.setting.key[0]} is given"
        before = off if self.setting.is_off else "Default"
        return f"{text} {before}: {shown}.".lstrip()
