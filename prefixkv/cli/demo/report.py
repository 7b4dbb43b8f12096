"""Results of the demo: the table that README shows, hit and sent tokens by turn, and JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from prefixkv.cli.demo import HERE, LinkRate
from prefixkv.cli.demo.workers import ChatAnswer
from prefixkv.cli.demo.workload import Played
from prefixkv.cli.outputs import aligned, drawing

_ALIKE_RATIO: Final = 1.1
"""Sides whose medians have a smaller ratio are alike, however close their own passes are."""

_BAR: Final = 48  # characters of the longest prompt


def machine() -> dict[str, Any]:
    """Return the machine and the versions that figures are measured with."""
    import psutil

    return {
        "machine": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": psutil.virtual_memory().total,
            "load_average_before": list(os.getloadavg()),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("prefixkv", "nixl", "torch", "numpy", "pyzmq")},
        },
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def compared(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Compare two sides' figures of several passes in words: by the ratio of their medians, theirs
    by ours; "alike" where that differs by no more than the passes of one side do, or by less than a
    tenth: two passes of a side may lie close together by chance.

    >>> compared([1.0, 1.2], [2.4, 2.0]), compared([1.0, 1.2], [1.2, 1.4])
    ('2.0 times lower', 'alike')
    """
    our, their = statistics.median(ours), statistics.median(theirs)
    spread = max(max(ours) - min(ours), max(theirs) - min(theirs))
    if abs(our - their) <= spread or max(our, their) < _ALIKE_RATIO * min(our, their):
        return "alike"
    if their < our:
        return f"{our / their:.1f} times higher"
    return f"{their / our:.1f} times lower"


@dataclass(frozen=True, slots=True)
class DemoPass:
    """All conversations once. `bytes_sent`: KV that prefill wrote."""

    link: LinkRate
    cache: bool
    played: Played
    bytes_sent: int

    @property
    def ttft_p50_s(self) -> float:
        return statistics.median(answer.ttft_s for answer in self.played.all())

    def figures(self) -> dict[str, Any]:
        answers = self.played.all()
        gaps = [gap for one in answers for gap in one.itl_s]
        return {
            "link": self.link.name,
            "link_bytes_per_s": self.link.bytes_per_s,
            "cache": self.cache,
            "requests": len(answers),
            "prompt_tokens": sum(one.usage.prompt_tokens for one in answers),
            "answer_tokens": sum(len(one.tokens) for one in answers),
            "hit_tokens": sum(one.usage.decode_hit_tokens for one in answers),
            "sent_tokens": sum(one.usage.sent_tokens for one in answers),
            "computed_tokens": sum(one.usage.computed_tokens for one in answers),
            "bytes_sent": self.bytes_sent,
            "ttft_p50_s": self.ttft_p50_s,
            "itl_p50_s": statistics.median(gaps) if gaps else None,
            "duration_s": self.played.duration_s,
        }


class Split(NamedTuple):
    """Tokens of prompts, by where decode had their KV from."""

    hit: float
    shared: float  # on their way there for another request
    sent: float

    def bar(self, longest: float) -> str:
        """Return a bar, of which `longest` tokens are `_BAR` characters.

        >>> Split(32, 8, 8).bar(48)
        '████████████████████████████████▒▒▒▒▒▒▒▒░░░░░░░░'
        """
        ends = [round(_BAR * sum(self[: at + 1]) / longest) for at in range(3)]
        return "█" * ends[0] + "▒" * (ends[1] - ends[0]) + "░" * (ends[2] - ends[1])


def split_of(answer: ChatAnswer) -> Split:
    usage = answer.usage
    return Split(usage.decode_hit_tokens, usage.shared_tokens, usage.sent_tokens)


@dataclass(slots=True)
class DemoReport:
    """All passes, in order: those of one link together, cache on and off turn about.

    Args:
        wrong: by `cache`, the number of answers that differ from transformers'.
        left: a line for each thing that was not given back at the end of a pass.
    """

    recipe: dict[str, Any]
    passes: list[DemoPass] = field(default_factory=list)
    wrong: dict[bool, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def of(self, cache: bool, link: LinkRate = HERE) -> list[DemoPass]:
        return [one for one in self.passes if (one.cache, one.link) == (cache, link)]

    def complaints(self) -> list[str]:
        wrong = (
            f"cache {'on' if cache else 'off'}: {num} answers are not what generate() says"
            for cache, num in self.wrong.items()
            if num
        )
        return [*wrong, *self.left]

    def rows(self) -> list[tuple[str, ...]]:
        """Return README's table: what, with the cache on, with it off, both compared."""
        firsts = [self.of(cache)[0].figures() for cache in (True, False)]
        right = []
        for cache in (True, False):
            num = sum(len(one.played.all()) for one in self.passes if one.cache == cache)
            right.append(f"{num - self.wrong[cache]} of {num}")
        rates = [f"{one['hit_tokens'] / one['prompt_tokens']:.1%}" for one in firsts]
        on, off = (one["bytes_sent"] for one in firsts)
        sent = [f"{num_bytes / 2**20:,.0f} MiB" for num_bytes in (on, off)]
        rows: list[tuple[str, ...]] = [
            ("answers that are what generate() says", *right, "token for token"),
            ("hit rate on decode, tokens", *rates, ""),
            ("KV sent, once over all turns", *sent, f"{off / on:.1f} times less"),
        ]
        for link in dict.fromkeys(one.link for one in self.passes):
            p50s = [[one.ttft_p50_s for one in self.of(cache, link)] for cache in (True, False)]
            where = "inside this machine" if link == HERE else f"over {link.name}"
            shown = (f"{1e3 * statistics.median(of):.0f} ms" for of in p50s)
            rows.append((f"TTFT P50 {where}", *shown, compared(*p50s)))
        return rows

    def by_turn(self) -> list[tuple[Split, Split]]:
        """Return the mean tokens of a prompt by turn, with the cache on and off."""
        sides = []
        for cache in (True, False):
            turns = zip(*self.of(cache)[0].played.answers, strict=False)
            sides.append([
                Split(*(statistics.mean(of) for of in zip(*map(split_of, answers), strict=True)))
                for answers in turns
            ])  # fmt: skip
        return [*zip(*sides, strict=True)]

    def as_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "answers_wrong": {"cache_on": self.wrong[True], "cache_off": self.wrong[False]},
            "rows": self.rows(),
            "by_turn": [
                {"cache_on": on._asdict(), "cache_off": off._asdict()} for on, off in self.by_turn()
            ],
            "passes": [one.figures() for one in self.passes],
        }


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    return aligned([("", "cache on", "off", ""), *rows], "<>><")


def picture(turns: Sequence[tuple[Split, Split]]) -> list[str]:
    longest = max(sum(split) for sides in turns for split in sides)
    lines = ["tokens of a prompt by turn: █ hit on decode, ▒ on their way for another chat, ░ sent"]
    for number, sides in enumerate(turns, 1):
        for label, split in zip((f"turn {number}, cache on", "off"), sides, strict=True):
            lines.append(f"{label:>16}  {split.bar(longest):<{_BAR}}  {split.sent:5.0f} sent")
    return lines


def draw(turns: Sequence[tuple[Split, Split]], path: Path) -> None:
    """Draw hit and sent tokens by turn. Needs matplotlib."""
    parts = (("hit on decode", "C2"), ("on their way for another chat", "C8"), ("sent", "C3"))
    at = range(1, len(turns) + 1)
    with drawing(path, ncols=2, figsize=(9, 4), sharey=True) as panels:
        for side, (panel, title) in enumerate(zip(panels, ("cache on", "cache off"), strict=True)):
            below = [0.0] * len(turns)
            for part, (label, colour) in enumerate(parts):
                heights = [sides[side][part] for sides in turns]
                panel.bar(at, heights, bottom=below, label=label, color=colour)
                below = [low + height for low, height in zip(below, heights, strict=True)]
            panel.set(title=title, xlabel="turn", xticks=[*at])
        panels[0].set_ylabel("tokens of a prompt, mean")
        panels[0].legend(fontsize="small")
