"""`prefixkv demo`: make a model, start its workers, play a workload with decode's cache on and off,
and compare every answer with that of transformers by itself."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prefixkv.cli.chats.rates import HERE, LinkRate
from prefixkv.cli.chats.workload import Workload, chat
from prefixkv.cli.figures import CACHE_NAMES, machine, times
from prefixkv.cli.outputs import check_writable, write_text
from prefixkv.serving import interrupts

if TYPE_CHECKING:
    from rich.console import Console

    from prefixkv.cli.chats.play import Vocabulary
    from prefixkv.cli.chats.report import ChatsReport
    from prefixkv.cli.chats.workers import ModelWorkers
    from prefixkv.engines.hf.reference import Reference

Say = Callable[[str], object]

# A Llama of 6.7 million parameters; its KV is 32 KiB per token.
SIZES: Final = {
    "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
CHATS: Final = {
    "conversations": 6, "turns": 5, "system_tokens": 384, "user_tokens": 40, "output_tokens": 20,
}  # fmt: skip
SETTINGS: Final = {"page_size": 16, "num_pages": 640}
PASSES: Final = 2  # of each kind over each link, turn about: first tokens differ from pass to pass
LINKS: Final = ("1Gbit",)  # that the chats are played over beside this machine's own
_MIN_TOKENS: Final = 16  # prompt of each request that comes before those that count

_DEFINITIONS: Final = {
    "cache_off": "decode's prefix cache is off; prefill's own stays on",
    "ttft_s": "from when a turn is sent to its first token, by the client; a turn is sent as soon "
    "as the one before it is answered, all conversations at once",
    "token_hit_rate": "sum of hit_tokens / sum of prompt tokens",
    "computed_tokens": "of prompts, by prefill: those that it did not have in its own cache",
    "sent_tokens": "of prompts, to decode: those that were not in its cache, nor on their way "
    "there for another request",
    "last_conversation": "ranges of tokens of each prompt, half-open",
    "bytes_sent": "KV bytes of writes that ended, on prefill",
    "ttft_p50_of_passes_s": "median of each pass; the passes of both kinds take turns",
    "links": "the same chats once more, prefill's transport limited to the bytes of KV per "
    "second of a link; what else a link has, such as its latency, is not modelled",
    "answers_wrong": "answers that are not, token for token, what transformers' generate() says "
    "to the same prompt in the same precision, float32",
}


def run(
    seed: int, caches: Sequence[bool], links: Sequence[LinkRate], console: Console,
    json_path: Path | None,
) -> int:  # fmt: skip
    """Returns the exit status: 0, or 1 if anything is wrong with a pass. Raises ConfigError before
    anything is started; ModelWorkerError, WorkerFailedError."""
    check_writable("--json", json_path)

    def print_it(what: Any) -> None:
        console.print(what, highlight=False)

    reports = run_chats(seed, caches, print_it, links=links)
    show(reports, print_it)
    if json_path is not None:
        found = json.dumps(as_json(reports), indent=2, allow_nan=False)
        write_text("--json", json_path, found + "\n")
    complaints = [complaint for report in reports for complaint in report.complaints()]
    for complaint in complaints:
        print_it(f"WRONG: {complaint}")
    return 1 if complaints else 0


def run_chats(
    seed: int, caches: Sequence[bool], say: Say, chats: Mapping[str, int] = CHATS,
    links: Sequence[LinkRate] = (), passes: int = PASSES,
) -> list[ChatsReport]:  # fmt: skip
    """Play the chats and compare the answers. Returns a report for this machine as it is, and one
    for each link. Raises ModelWorkerError, WorkerFailedError.

    Args:
        caches: passes to run: decode's cache on, off.
        passes: of each kind over each link, turn about.
    """
    from prefixkv.engines.hf.reference import Reference
    from prefixkv.engines.hf.small import small_model, small_tokenizer

    model = small_model(seed, **SIZES, trial=False)
    reference = Reference(model)
    parameters = sum(one.numel() for one in model.model.parameters())
    kv_bytes = model.make_pool(1, 1).layout.kv_bytes_per_token
    workload = chat(seed, **chats)
    # The workers are processes of their own, so the model reaches them as files.
    with tempfile.TemporaryDirectory(prefix="prefixkv-demo-") as folder:
        path = Path(folder)
        reference.save(path)
        small_tokenizer().save(str(path / "tokenizer.json"))
        say(
            f"a Llama of {parameters / 1e6:.1f} million random parameters, seed {seed}, "
            f"{kv_bytes // 1024} KiB of KV per token: starting its workers"
        )
        # Workers of their own for each link: the rate is a setting of theirs.
        reports = [
            interrupts.run(partial(_play_passes, path, caches, workload, say, link, passes))
            for link in (HERE, *links)
        ]
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
    # After the workers have ended, so that the comparison takes no time from the figures.
    say("comparing every answer with transformers' generate()")
    for report in reports:
        report.recipe = recipe
    compare(reports, reference)
    return reports


async def _play_passes(
    folder: Path, caches: Sequence[bool], workload: Workload, say: Say, link: LinkRate, passes: int
) -> ChatsReport:
    """Play over one link, cache on and off, on workers that share one prefill worker."""
    from prefixkv.cli.chats.play import play
    from prefixkv.cli.chats.report import ChatsReport
    from prefixkv.cli.chats.workers import PREFILL, ModelWorkers

    report = ChatsReport({}, link=link)
    spell = small_vocabulary()
    decode = {_name(on): {**SETTINGS, "cache": on} for on in caches}
    prefill = {**SETTINGS, "transport_max_bytes_per_s": link.bytes_per_s}
    async with ModelWorkers(folder, prefill, decode) as workers:
        for name in decode:  # so that no pass includes the first connection of two nodes
            await workers.ask(name, "first", [*range(_MIN_TOKENS)], 2, f"first {name}")
        # Turn about, the order changed each time: what slows the machine meanwhile slows both.
        for number in range(passes):
            for on in caches if number % 2 == 0 else reversed(caches):
                title = f"{link.name}, {CACHE_NAMES[on].replace('_', ' ')}"
                say(f"{workload.num_requests} turns of {len(workload.sessions)} chats, {title}")
                # Bytes are counted from settled to settled state: no write of another pass is among
                # them.
                before, _ = await workers.settled(PREFILL)
                # A salt of its own for each pass, so that none finds the KV of another.
                salt = f"{CACHE_NAMES[on]}.{number}"
                played = await play(workers, _name(on), workload, spell, salt)
                # Each pass must leave no page in use, on either side.
                report.left += await _pages_left(workers, PREFILL, title)
                report.left += await _pages_left(workers, _name(on), title)
                after = await workers.figures(PREFILL)
                if number == 0:
                    report.played[on] = played
                    report.bytes_sent[on] = int(_bytes_sent(after) - _bytes_sent(before))
                else:
                    report.again.setdefault(on, []).append(played)
        # A retry would hide in the latencies: the report counts it as a defect.
        if workers.retried:
            report.left.append(f"chats: {workers.retried} requests were not answered at first")
    return report


def small_vocabulary() -> Vocabulary:
    from prefixkv.cli.chats.play import Vocabulary
    from prefixkv.engines.hf.small import WORDS, small_tokenizer

    ids = small_tokenizer().get_vocab()
    marks = (ids[f"<|{name}|>"] for name in ("system", "user", "assistant", "end"))
    return Vocabulary(WORDS.start, WORDS.stop, *marks)


def _name(on: bool) -> str:
    return "decode-0" if on else "decode-1"


async def _pages_left(workers: ModelWorkers, name: str, title: str) -> list[str]:
    """Return a line for each page state in which a worker still holds pages after a pass."""
    _, pages = await workers.settled(name)
    return [f"chats, {title}: {num} pages left {state} on {name}" for state, num in pages.items()]


def _bytes_sent(figures: dict[str, float]) -> float:
    return figures['prefixkv_sent_bytes_total{node="prefill"}']


def compare(reports: Sequence[ChatsReport], reference: Reference) -> None:
    """Count in each report's `wrong` the answers that differ from the reference's."""

    @cache  # most prompts occur in all passes
    def expected(prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
        return reference.answer(prompt, max_new_tokens)

    for report in reports:
        for cached in report.played:
            report.wrong[cached] = sum(
                answer.tokens != expected(tuple(answer.prompt), answer.max_new_tokens)
                for played in report.passes(cached)
                for answer in played.all()
            )


def as_json(reports: Sequence[ChatsReport]) -> dict[str, Any]:
    """Return the first report whole, of the others their figures."""
    here, *others = reports
    links = {}
    for report in others:
        found = report.as_json()
        links[report.link.name] = {
            "bytes_per_s": report.link.bytes_per_s, "runs": found["runs"],
            "ratios": found["ratios"],
        }  # fmt: skip
    return {**here.as_json(), "links": links}


def show(reports: Sequence[ChatsReport], print_it: Callable[[Any], object]) -> None:
    from prefixkv.cli.chats.report import links_table
    from prefixkv.engines.hf.small import small_tokenizer

    here = reports[0]
    print_it(here.table())
    fewer = here.as_json()["ratios"]["bytes_sent"]
    if fewer is not None:
        print_it(f"cache on against off: {times(fewer, 'fewer bytes sent', 1)}")
    print_it(links_table(reports))
    print_it(here.conversation(small_tokenizer().decode))
