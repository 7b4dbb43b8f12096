"""Conversations are what their seed says."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.cli.chats.workload import Workload, chat

CHAT = {"system_tokens": 40, "user_tokens": 10, "output_tokens": 6}


def prompt(workload: Workload, session: int) -> np.ndarray:
    return np.concatenate([run.tokens() for run in workload.sessions[session][0].text])


def test_equal_seeds_give_equal_prompts_and_others_do_not():
    a, b, c = (chat(seed, 3, 2, **CHAT) for seed in (5, 5, 6))
    assert a == b
    assert np.array_equal(prompt(a, 1), prompt(b, 1))
    assert not np.array_equal(prompt(a, 1)[:40], prompt(c, 1)[:40])


def test_conversations_share_the_system_prompt_and_nothing_else():
    workload = chat(1, 4, 3, **CHAT)
    first, second = prompt(workload, 0), prompt(workload, 1)
    assert np.array_equal(first[:40], second[:40])
    assert not np.any(first[40:50] == second[40:50])


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 100))
def test_requests_cuts_the_later_turns(conversations, turns, requests):
    workload = chat(1, conversations, turns, requests=requests, **CHAT)
    assert workload.num_requests == min(requests, conversations * turns)
    lengths = [len(session) for session in workload.sessions]
    assert max(lengths) - min(lengths) <= 1
