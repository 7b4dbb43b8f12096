"""The `prefixkv` command. Bad input is one line on stderr and exit status 2; heavy imports wait for
their command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from prefixkv.cli.options import DemoOptions
from prefixkv.cli.replay import replay
from prefixkv.errors import CallerError, CapacityError, PrefixKVError

_DEFAULTS = DemoOptions()

app = typer.Typer(
    name="prefixkv",
    help="Decode-side radix prefix cache for prefill/decode disaggregation over NIXL.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Cache(StrEnum):
    on = "on"
    off = "off"
    both = "both"


class Dtype(StrEnum):
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float8 = "float8"
    uint8 = "uint8"


class Attention(StrEnum):
    mha = "mha"
    mla = "mla"


class Layout(StrEnum):
    layer_major = "layer_major"
    page_major = "page_major"


class Switch(StrEnum):
    on = "on"
    off = "off"


app.command()(replay)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Of the workload and its arrivals.")] = _DEFAULTS.seed,
    conversations: Annotated[
        int, typer.Option(help="Chats that share a system prompt.")
    ] = _DEFAULTS.conversations,
    turns: Annotated[int, typer.Option(help="Turns a conversation.")] = _DEFAULTS.turns,
    requests: Annotated[
        int | None, typer.Option(help="Cut the workload to this many requests.", show_default="all")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Requests under way at once, at most.")
    ] = _DEFAULTS.concurrency,
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = _DEFAULTS.page_size,
    layers: Annotated[int, typer.Option()] = _DEFAULTS.layers,
    kv_heads: Annotated[
        int | None, typer.Option(help="KV heads a layer.", show_default="8; mla: 1")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Elements a head.", show_default="128; mla: 576")
    ] = None,
    dtype: Annotated[Dtype, typer.Option()] = Dtype.bfloat16,
    attention: Annotated[Attention, typer.Option()] = Attention.mha,
    layout: Annotated[Layout, typer.Option()] = Layout.layer_major,
    prefill_tp: Annotated[
        int, typer.Option(help="Tensor-parallel ranks of prefill.")
    ] = _DEFAULTS.prefill_tp,
    decode_tp: Annotated[
        int, typer.Option(help="Tensor-parallel ranks of decode.")
    ] = _DEFAULTS.decode_tp,
    prefill_layout: Annotated[Layout | None, typer.Option(show_default="--layout")] = None,
    decode_layout: Annotated[Layout | None, typer.Option(show_default="--layout")] = None,
    staging: Annotated[
        Switch, typer.Option(help="Gather slices of heads, where the ranks differ.")
    ] = Switch.on,
    staging_leases: Annotated[
        float, typer.Option(help="A rank's staging memory, in leases of 4 MiB.")
    ] = _DEFAULTS.staging_leases,
    prefill_pages: Annotated[
        int, typer.Option(help="Pages in prefill's pool.")
    ] = _DEFAULTS.prefill_pages,
    decode_pages: Annotated[
        int, typer.Option(help="Pages in decode's pool.")
    ] = _DEFAULTS.decode_pages,
    cache: Annotated[
        Cache, typer.Option(help="Decode's prefix cache; prefill's own is always on.")
    ] = Cache.both,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Replay a Mooncake JSONL trace instead of chats."),
    ] = None,
    block_tokens: Annotated[
        int, typer.Option(help="Tokens that a trace's block of 512 is scaled down to.")
    ] = _DEFAULTS.block_tokens,
    system_tokens: Annotated[
        int, typer.Option(help="The shared system prompt.")
    ] = _DEFAULTS.system_tokens,
    user_tokens: Annotated[
        int, typer.Option(help="A user's text, median.")
    ] = _DEFAULTS.user_tokens,
    output_tokens: Annotated[
        int, typer.Option(help="An answer, median.")
    ] = _DEFAULTS.output_tokens,
    chunk_tokens: Annotated[
        int, typer.Option(help="Tokens prefill computes at a time.")
    ] = _DEFAULTS.chunk_tokens,
    step_ms: Annotated[
        float, typer.Option(help="The shortest a decode step may be.")
    ] = _DEFAULTS.step_ms,
    prefill_us_per_token: Annotated[
        float, typer.Option(help="Compute time to model, beside the writing of the KV.")
    ] = _DEFAULTS.prefill_us_per_token,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all figures to FILE.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the TTFT distributions.")
    ] = None,
) -> int:
    """A multi-turn workload over real NIXL between two processes, with decode's prefix cache on and
    off.

    A stand-in engine with real bytes: every KV byte is verified in a first pass; then the request
    rate that either side can sustain is measured, and the latencies at 0.7 of what it is without
    the cache.
    """
    options = DemoOptions(
        seed=seed,
        conversations=conversations,
        turns=turns,
        requests=requests,
        concurrency=concurrency,
        page_size=page_size,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype.value,
        attention=attention.value,
        layout=layout.value,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prefill_layout=None if prefill_layout is None else prefill_layout.value,
        decode_layout=None if decode_layout is None else decode_layout.value,
        staging=staging.value,
        staging_leases=staging_leases,
        prefill_pages=prefill_pages,
        decode_pages=decode_pages,
        system_tokens=system_tokens,
        user_tokens=user_tokens,
        output_tokens=output_tokens,
        chunk_tokens=chunk_tokens,
        step_ms=step_ms,
        prefill_us_per_token=prefill_us_per_token,
        trace=trace,
        block_tokens=block_tokens,
    )
    from rich.console import Console

    from prefixkv.cli.demo import run

    caches = {Cache.on: (True,), Cache.off: (False,), Cache.both: (True, False)}[cache]
    return run(options, caches, Console(), json_path=json, plot_path=plot)


def run_command(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit status and lets no exception of ours through."""
    return run_app(app, "prefixkv", arguments)


def run_app(app: typer.Typer, program: str, arguments: Sequence[str]) -> int:
    """The same for any Typer application; `program` begins each message."""
    try:
        status = app(args=list(arguments), prog_name=program, standalone_mode=False)
    except (CallerError, CapacityError) as error:
        return _say(program, error, 2)
    except PrefixKVError as error:
        return _say(program, error, 1)
    except KeyboardInterrupt:
        return _say(program, "interrupted", 130)
    except Exception as error:
        # Typer's usage errors: their class has moved between its versions, their method has not.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return _say(program, message(), 2)
    if status == 130:  # how Typer passes on a KeyboardInterrupt
        return _say(program, "interrupted", status)
    return status if isinstance(status, int) else 0


def _say(program: str, message: object, status: int) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return status


def main() -> None:
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
