"""Results of the chats with a model: figures, their tables, and one conversation turn by turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from prefixkv.cli.chats.play import Played
from prefixkv.cli.chats.rates import HERE, LinkRate
from prefixkv.cli.chats.workers import ChatAnswer
from prefixkv.cli.figures import (
    CACHE_NAMES,
    compared,
    less,
    milliseconds,
    percent,
    quantiles,
    ratio,
)

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN_CHARACTERS: Final = 14  # per answer


@dataclass(slots=True)
class ChatsReport:
    """Passes by whether decode's cache was on, and their defects.

    `played` are the first passes, which the figures are of, `again` the later ones, for which only
    first tokens and answers count. `bytes_sent` is the KV that prefill wrote in each first pass,
    `wrong` the number of answers of all passes that differ from transformers', `left` one line for
    each thing that was not given back at its end. `link` is what the KV travelled on.
    """

    recipe: dict[str, Any]
    played: dict[bool, Played] = field(default_factory=dict)
    bytes_sent: dict[bool, int] = field(default_factory=dict)
    wrong: dict[bool, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    again: dict[bool, list[Played]] = field(default_factory=dict)
    link: LinkRate = HERE

    def passes(self, cache: bool) -> list[Played]:
        """The first pass comes first."""
        return [self.played[cache], *self.again.get(cache, ())]

    def ttft_p50s(self, cache: bool) -> list[float]:
        """Return the median TTFT of the turns, in seconds, of each pass of this kind."""
        return [
            statistics.median(answer.ttft_s for answer in played.all())
            for played in self.passes(cache)
        ]

    def ttft_in_words(self) -> str:
        """Compare the median TTFT with the cache on to that with it off: "alike" if passes of one
        kind differ by as much, or they differ by less than a tenth; "" unless both were played."""
        if len(self.played) < 2:
            return ""
        on, off = self.ttft_p50s(True), self.ttft_p50s(False)
        return compared(on, off, "lower")

    def complaints(self) -> list[str]:
        wrong = (
            f"chats, {self.link.name}, {CACHE_NAMES[cache]}: "
            f"{num} answers are not what generate() says"
            for cache, num in self.wrong.items()
            if num
        )
        return [*wrong, *self.left]

    def as_json(self) -> dict[str, Any]:
        """`ratios` are cache_off / cache_on, None unless both were run."""
        runs = {CACHE_NAMES[cache]: self._figures(cache) for cache in self.played}
        return {
            "recipe": self.recipe,
            "runs": runs,
            # Each pass is a run; ratios compare the two.
            "ratios": {
                "ttft_p50": less(runs, lambda run: statistics.median(run["ttft_p50_of_passes_s"])),
                "bytes_sent": less(runs, lambda run: run["bytes_sent"]),
            },
            "last_conversation": [_of_turn(answer) for answer in self.last_conversation()],
        }

    def _figures(self, cache: bool) -> dict[str, Any]:
        played = self.played[cache]
        answers = played.all()

        def total(of: Callable[[ChatAnswer], int]) -> int:
            return sum(map(of, answers))

        prompt_tokens = total(lambda answer: len(answer.prompt))
        hit_tokens = total(lambda answer: answer.hit_tokens)
        prefill_hit_tokens = total(lambda answer: answer.prefill_hit_tokens)
        return {
            "requests": len(answers),
            # None until `compare` has run.
            "answers_wrong": self.wrong.get(cache),
            "prompt_tokens": prompt_tokens,
            "answer_tokens": total(lambda answer: len(answer.tokens)),
            "hit_tokens": hit_tokens,
            "token_hit_rate": ratio(hit_tokens, prompt_tokens),
            "prefill_hit_rate": ratio(prefill_hit_tokens, prompt_tokens),
            "computed_tokens": total(lambda answer: answer.computed_tokens),
            "sent_tokens": total(lambda answer: answer.sent_tokens),
            "bytes_sent": self.bytes_sent[cache],
            "ttft_p50_of_passes_s": self.ttft_p50s(cache),
            "ttft_s": quantiles([answer.ttft_s for answer in answers], 50, 90, 99),
            "itl_s": quantiles([one for answer in answers for one in answer.itl_s], 50, 99),
            "duration_s": played.duration_s,
            "requests_per_s": ratio(len(answers), played.duration_s),
        }

    def last_conversation(self) -> Sequence[ChatAnswer]:
        """It is of the pass with the cache on, if that was run."""
        # The last one: by then the shared system prompt is cached, so its ranges show all kinds of
        # hits.
        played = self.played.get(True) or next(iter(self.played.values()))
        return played.answers[-1]

    def table(self) -> Table:
        from rich.table import Table

        table = Table(title=f"chats over two processes, {self.link.name}")
        table.add_column("")
        runs = self.as_json()["runs"]
        rows = [[label] for label, _ in _ROWS]
        # Columns are passes, rows are figures: the rows grow by one cell per pass.
        for name, figures in runs.items():
            table.add_column(name.replace("_", " "), justify="right")
            for row, (_, show) in zip(rows, _ROWS, strict=True):
                row.append(show(figures))
        for row in rows:
            table.add_row(*row)
        return table

    def conversation(self, text_of: Callable[[list[int]], str]) -> Table:
        """Return the last conversation, one line per turn. `text_of` decodes an answer's tokens."""
        from rich.table import Table

        cache = "cache on" if True in self.played else "cache off"
        title = f"the last conversation, {cache}: which tokens of each prompt were"
        table = Table(title=title, box=None)
        for name in _OF_TURN:
            table.add_column(name.replace("_", " "), justify="right")
        table.add_column("the answer", no_wrap=True)
        for number, answer in enumerate(self.last_conversation(), 1):
            ranges = _of_turn(answer)
            text = text_of(answer.tokens).strip()[:_SHOWN_CHARACTERS]
            # An answer is cut between two words, so that the table stays narrow.
            row = (_range(*ranges[name]) for name in _OF_TURN[1:])
            table.add_row(str(number), *row, f"{text.rpartition(' ')[0] or text} ...")
        return table


def links_table(reports: Sequence[ChatsReport]) -> Table:
    from rich.table import Table

    table = Table(title="TTFT P50 (ms), by what the KV travels on")
    for name in ("link", *(CACHE_NAMES[cache].replace("_", " ") for cache in reports[0].played)):
        table.add_column(name, justify="left" if name == "link" else "right")
    table.add_column("")
    for report in reports:
        shown = (
            milliseconds(statistics.median(report.ttft_p50s(cache))) for cache in report.played
        )
        table.add_row(report.link.name, *shown, report.ttft_in_words())
    return table


_OF_TURN: Final = (
    "turn", "prompt", "hit_on_decode", "on_the_way", "sent", "hit_on_prefill", "computed",
)  # fmt: skip


def _of_turn(answer: ChatAnswer) -> dict[str, tuple[int, int]]:
    """Return ranges of prompt tokens, by where their KV came from: on decode, then on prefill."""
    end, hit, own = len(answer.prompt), answer.hit_tokens, answer.prefill_hit_tokens
    # On decode: cached, then arriving for another request, then sent. On prefill: cached, computed.
    joined = hit + answer.shared_tokens
    ranges = (0, end), (0, hit), (hit, joined), (joined, end), (0, own), (own, end)
    return dict(zip(_OF_TURN[1:], ranges, strict=True))


def _range(start: int, end: int) -> str:
    return f"{start}:{end}" if start < end else "-"


# Rows of the table: the label, and the figure as text.
_ROWS: Final[tuple[tuple[str, Callable[[dict[str, Any]], str]], ...]] = (
    ("answers", lambda run: f"{run['requests']:,}"),
    ("not what generate() says", lambda run: f"{run['answers_wrong']:,}"),
    ("hit rate, decode", lambda run: percent(run["token_hit_rate"])),
    ("hit rate, prefill", lambda run: percent(run["prefill_hit_rate"])),
    ("prompt tokens", lambda run: f"{run['prompt_tokens']:,}"),
    ("computed by prefill", lambda run: f"{run['computed_tokens']:,}"),
    ("MiB of KV sent", lambda run: f"{run['bytes_sent'] / 2**20:,.0f}"),
    ("TTFT P50 (ms)", lambda run: milliseconds(run["ttft_s"]["p50"])),
    ("TTFT P90 (ms)", lambda run: milliseconds(run["ttft_s"]["p90"])),
    ("between tokens P50 (ms)", lambda run: milliseconds(run["itl_s"]["p50"])),
    ("answers/s", lambda run: f"{run['requests_per_s']:.1f}"),
)
