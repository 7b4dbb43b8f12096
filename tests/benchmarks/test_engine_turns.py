"""What the benchmark of turns plays: the same lengths and system prompt each time, other words."""

from __future__ import annotations

from benchmarks.engine_turns import CHATS, WORDS, others
from prefixkv.cli.chats.workload import chat


def test_passes_share_lengths_and_the_system_prompt_and_nothing_else() -> None:
    sizes = CHATS["turns"]
    workload = chat(1, **sizes)
    one, other = others(workload, 1), others(workload, 2)
    num = sizes["system_tokens"] + 2  # with its marks
    for before, after in zip(one.sessions, other.sessions, strict=True):
        first, second = (WORDS(session[0], True) for session in (before, after))
        assert first[:num] == second[:num]
        assert first[num + 1 : -2] != second[num + 1 : -2]
        assert [turn.text_len for turn in before] == [turn.text_len for turn in after]
        assert [turn.output_len for turn in before] == [turn.output_len for turn in after]
    spoken = {tuple(WORDS(turn, False)) for session in one.sessions for turn in session[1:]}
    again = {tuple(WORDS(turn, False)) for session in other.sessions for turn in session[1:]}
    assert not spoken & again
