"""Workers and fronts as processes: what `prefixkv worker`, `prefixkv serve` and `prefixkv front`
run. The extra `serve`.

- `config`: settings of a worker and a front, and those of the workers of `serve`.
- `http`: ports, bounds, time-outs, a key, errors; `openai`: OpenAI's interface as plain values.
- `wire`: what a front, a decode worker and a prefill worker say to each other.
- `worker`: one process with one node; `fleet`: the workers as a front sees them; `front`: the
  OpenAI interface over a fleet; `launch`: all of it.
- `log`: what is known of a request, and its lines and refusals by reason; `tracing`: its spans (the
  extra `otel`); `api`: errors, sessions and counts of requests.
- `cluster`: the workers as actors of a Ray cluster (the extra `ray`).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from prefixkv.errors import ConfigError

EXTRA: Final = ("aiohttp", "jinja2", "prometheus_client", "starlette", "uvicorn")


def check_packages(*, with_model: bool = True) -> None:
    """Raise ConfigError, for a command's one line of error, if a package of the extra `serve` is
    missing. `with_model`: check the packages that a model needs too."""
    from prefixkv.engines import hf

    needed = (*EXTRA, *hf.EXTRA) if with_model else EXTRA
    if missing := [name for name in needed if not is_there(name)]:
        raise ConfigError(f"serving needs {', '.join(missing)}: pip install 'prefixkv[serve]'")


def is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # sys.modules has None for it, which blocks its import
        return False
