"""The demo's chats with real workers, small."""

import asyncio
import io
import signal
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from prefixkv.cli.demo import link_of
from prefixkv.cli.demo.command import run_chats
from prefixkv.cli.demo.workers import ModelWorkerError, ModelWorkers
from prefixkv.engines.hf.models import Reference
from prefixkv.engines.hf.small import small_model, small_tokenizer
from prefixkv.errors import ConfigError
from tests.support.patience import PATIENCE_S
from tests.support.served import Served

CHATS = {
    "conversations": 2, "turns": 3, "system_tokens": 40, "user_tokens": 16, "output_tokens": 8,
}  # fmt: skip


def test_every_answer_is_generates_and_the_cache_spares_bytes() -> None:
    link = link_of("100Mbit")
    console = Console(file=io.StringIO(), width=200)
    report = run_chats(3, [link], console, CHATS)
    assert report.complaints() == []
    assert report.wrong == {True: 0, False: 0}
    kv_bytes = report.recipe["kv_bytes_per_token"]
    for on in (True, False):
        here, slow = report.of(on), report.of(on, link)
        assert len(here) == len(slow) == 2
        for one in slow:  # the rate bounds what prefill sends
            assert one.played.duration_s > 0.8 * one.bytes_sent / link.bytes_per_s
        pages = sum(-(-answer.usage.sent_tokens // 16) for answer in here[0].played.all())
        assert here[0].bytes_sent == pages * 16 * kv_bytes
    cached, plain = report.of(True)[0], report.of(False)[0]
    assert plain.bytes_sent == report.of(False, link)[0].bytes_sent > cached.bytes_sent
    on, off = cached.played.all(), plain.played.all()
    assert [answer.prompt for answer in on] == [answer.prompt for answer in off]
    assert not any(answer.usage.decode_hit_tokens or answer.usage.shared_tokens for answer in off)
    for first, *later in cached.played.answers:
        assert first.usage.decode_hit_tokens == 0
        for before, after in zip((first, *later), later, strict=False):
            # Of an answer's last token there is no KV.
            there = len(before.prompt) + len(before.tokens) - 1
            assert after.usage.decode_hit_tokens == there // 16 * 16
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("  chat ") == 12  # each turn once, with the cache on and off


def test_what_a_worker_refuses_is_said(tmp_path: Path) -> None:
    Reference(small_model(1, trial=False)).save(tmp_path)
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))

    async def ask() -> None:
        few = {"num_pages": 8}
        async with ModelWorkers(tmp_path, few, {"decode": few}) as workers:
            with pytest.raises(ModelWorkerError, match="request long: "):
                await workers.ask("decode", "long", [1] * 200, 4)
            answer = await workers.ask("decode", "short", [1] * 20, 4, ignore_end=True)
            assert len(answer.tokens) == 4
            assert (await workers.settled("decode"))[1] == {}

    asyncio.run(ask())


def test_settings_of_one_worker_that_are_refused_end_those_that_were_started(
    tmp_path: Path,
) -> None:
    Reference(small_model(1, trial=False)).save(tmp_path)
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))

    async def start() -> None:
        async with ModelWorkers(tmp_path, {"num_pages": 8}, {"decode": {"num_page": 8}}):
            raise AssertionError("it started")

    before = psutil.Process().children()  # servers that tests share
    with pytest.raises(ConfigError, match="there is no setting 'num_page'"):
        asyncio.run(asyncio.wait_for(start(), PATIENCE_S))
    assert psutil.Process().children() == before


@pytest.mark.parametrize("moment", ["a Llama", "this machine, cache on"])
def test_ctrl_c_ends_the_demo_with_one_line_and_all_its_workers(moment: str) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in the background
    try:
        with Served("demo") as demo:
            demo.line(moment)
            started = psutil.Process(demo.process.pid).children(recursive=True)
            demo.signal(signal.SIGINT)  # a worker is in a session of its own: a terminal's too
            assert demo.ended() == 130
            _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)
            assert alive == []
    finally:
        signal.signal(signal.SIGINT, before)
    assert demo.err == ["prefixkv: interrupted\n"]
