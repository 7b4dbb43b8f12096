"""`prefixkv demo`: chats with a small model over worker processes, decode's cache on and off. Every
answer is compared with that of transformers by itself."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from prefixkv.cli.demo import HERE, LinkRate
from prefixkv.cli.demo.report import (
    DemoPass,
    DemoReport,
    draw,
    machine,
    picture,
    split_of,
    table,
)
from prefixkv.cli.demo.workers import PREFILL, ChatAnswer, ModelWorkers
from prefixkv.cli.demo.workload import Workload, chat, play, small_vocabulary
from prefixkv.cli.outputs import write_json
from prefixkv.engines.hf.models import Reference
from prefixkv.engines.hf.small import small_model, small_tokenizer

# A Llama of 6.6 million parameters; its KV is 32 KiB per token.
SIZES: Final = {
    "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
CHATS: Final = {
    "conversations": 6, "turns": 5, "system_tokens": 384, "user_tokens": 40, "output_tokens": 20,
}  # fmt: skip
SETTINGS: Final = {"page_size": 16, "num_pages": 640}
PASSES: Final = 2  # of each kind over each link, turn about: first tokens differ from pass to pass
_MIN_TOKENS: Final = 16  # prompt of each request that comes before those that count
_SENT: Final = 'prefixkv_sent_bytes_total{node="prefill"}'
_DECODE: Final = {True: "decode-0", False: "decode-1"}  # workers by whether they have a cache

_DEFINITIONS: Final = {
    "cache off": "decode's prefix cache is off; prefill's own stays on",
    "ttft": "from when a turn is sent to its first token, by the client; a turn is sent as soon as "
    "the one before it is answered, all conversations at once; of a row, the median of the passes' "
    "medians",
    "sent_tokens": "of prompts, to decode: those that were not in its cache, nor on their way "
    "there for another request",
    "bytes_sent": "KV bytes of writes that ended, on prefill",
    "link": "prefill's transport is limited to the bytes of KV per second of a link; what else a "
    "link has, such as its latency, is not modelled",
    "answers_wrong": "answers that are not, token for token, what transformers' generate() says "
    "to the same prompt in the same precision, float32",
}


def run(seed: int, links: Sequence[LinkRate], json_file: Path | None, plot: Path | None) -> int:
    """Returns the exit status: 0, or 1 if anything is wrong with a pass. Raises ConfigError before
    anything is started; ModelWorkerError, WorkerFailedError."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    report = run_chats(seed, links, console)
    for lines in (picture(report.by_turn()), table(report.rows())):
        console.print("\n" + "\n".join(lines))
    write_json(json_file, report.as_json())
    if plot is not None:
        draw(report.by_turn(), plot)
    for complaint in report.complaints():
        console.print(f"WRONG: {complaint}")
    return int(bool(report.complaints()))


def run_chats(
    seed: int, links: Sequence[LinkRate], console: Console, chats: Mapping[str, int] = CHATS,
    passes: int = PASSES,
) -> DemoReport:  # fmt: skip
    """Play the chats on this machine as it is and over each link, and compare the answers. Raises
    ModelWorkerError, WorkerFailedError."""
    model = small_model(seed, **SIZES, trial=False)
    reference = Reference(model)
    parameters = sum(one.numel() for one in model.model.parameters())
    kv_bytes = model.make_pool(1, 1).layout.kv_bytes_per_token
    workload = chat(seed, **chats)
    # A number comes with its recipe: what is needed to measure it again.
    recipe: dict[str, Any] = {
        "command": "prefixkv demo",
        "seed": seed,
        **machine(),
        "model": {"kind": "llama", "parameters": parameters, **SIZES, "dtype": "float32"},
        "kv_bytes_per_token": kv_bytes,
        "workload": {**chats, "requests": workload.num_requests},
        "passes": passes,
        "workers": {**SETTINGS, "torch_threads": 1},
        "definitions": _DEFINITIONS,
    }
    recipe["versions"]["transformers"] = version("transformers")
    report = DemoReport(recipe)
    total = workload.num_requests * 2 * passes * (1 + len(links))
    console.print(
        f"a Llama of {parameters / 1e6:.1f} million random parameters, seed {seed}, "
        f"{kv_bytes // 1024} KiB of KV per token; {workload.num_requests} turns of "
        f"{len(workload.sessions)} chats, {total // workload.num_requests} times"
    )
    # The workers are processes of their own, so the model reaches them as files.
    with (
        tempfile.TemporaryDirectory(prefix="prefixkv-demo-") as name,
        _Screen(console, total) as screen,
    ):
        folder = Path(name)
        reference.save(folder)
        small_tokenizer().save(str(folder / "tokenizer.json"))
        for link in (HERE, *links):
            # Workers of their own for each link: the rate is a setting of theirs.
            screen.begin("starting a prefill and two decode workers")
            asyncio.run(_play_passes(folder, workload, screen, link, passes, report))
    # After the workers have ended, so that the comparison takes no time from the figures.
    console.print("comparing every answer with transformers' generate()")
    compare(report, reference)
    return report


class _Screen(Progress):
    """What is seen while the chats are played: a bar with the time left, and turns as they come."""

    def __init__(self, console: Console, total: int) -> None:
        super().__init__(
            "{task.description}", BarColumn(), MofNCompleteColumn(), "turns,",
            TimeRemainingColumn(), "left", console=console, transient=True,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._turns = self.add_task("", total=total)
        self._decode = small_tokenizer().decode

    def begin(self, title: str) -> None:
        self.update(self._turns, description=title)

    def turn(self, shown: bool, number: int, at: int, answer: ChatAnswer) -> None:
        self.advance(self._turns)
        if shown:
            text = self._decode(answer.tokens).strip()[:20].rpartition(" ")[0]
            split = split_of(answer)
            self.console.print(
                f"  chat {number + 1}, turn {at + 1}: {split.hit:4} tokens hit, {split.sent:4} "
                f"sent, {answer.ttft_s * 1e3:4.0f} ms  {split.bar(1000)}  {text} ..."
            )


async def _play_passes(
    folder: Path, workload: Workload, screen: _Screen, link: LinkRate, passes: int,
    report: DemoReport,
) -> None:  # fmt: skip
    """Play over one link, cache on and off, on workers that share one prefill worker."""
    spell = small_vocabulary()
    decode = {name: {**SETTINGS, "cache": on} for on, name in _DECODE.items()}
    prefill = {**SETTINGS, "transport_max_bytes_per_s": link.bytes_per_s}
    async with ModelWorkers(folder, prefill, decode) as workers:
        for name in decode:  # so that no pass includes the first connection of two nodes
            await workers.ask(name, "first", [*range(_MIN_TOKENS)], 2, f"first {name}")
        # Turn about, the order changed each time: what slows the machine meanwhile slows both.
        for number, on in [
            (one, on) for one in range(passes) for on in (one % 2 == 0, one % 2 == 1)
        ]:
            title = f"{link.name}, cache {'on' if on else 'off'}"
            screen.begin(title)
            if number == 0:
                screen.console.print(f"{title}, {workload.num_requests} turns")
            # Bytes are counted from settled to settled state: no write of another pass is among
            # them.
            before, _ = await workers.settled(PREFILL)
            shown = partial(screen.turn, number == 0 and link == HERE)
            # A salt of its own for each pass, so that none finds the KV of another.
            salt = f"{on}.{number}"
            played = await play(workers, _DECODE[on], workload, spell, salt, on_answer=shown)
            after, pages = await workers.settled(PREFILL)
            sent = int(after[_SENT] - before[_SENT])
            report.passes.append(DemoPass(link, on, played, sent))
            # Each pass must leave no page in use, on either side.
            _, on_decode = await workers.settled(_DECODE[on])
            report.left += [
                f"{title}: {num} pages left {state} on {name}"
                for name, left in ((PREFILL, pages), (_DECODE[on], on_decode))
                for state, num in left.items()
            ]


def compare(report: DemoReport, reference: Reference) -> None:
    """Count the answers that differ from the reference's."""

    @cache  # most prompts occur in all passes
    def expected(prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
        return reference.answer(prompt, max_new_tokens)

    report.wrong = {
        cached: sum(
            answer.tokens != expected(tuple(answer.prompt), answer.max_new_tokens)
            for one in report.passes
            if one.cache == cached
            for answer in one.played.all()
        )
        for cached in (True, False)
    }
