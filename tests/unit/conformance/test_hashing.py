"""Prefix hashes against a loop in plain integers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.conformance import hashing
from prefixkv.conformance.hashing import PrefixHasher

tokens_of = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def by_hand(tokens):
    state, out = hashing._START, []
    for token in tokens:
        state = (state * hashing._FACTOR + token + 1) % 2**64
        out.append(state)
    return out


@given(st.lists(tokens_of, min_size=1, max_size=3))
def test_prefixes_are_the_loop(sequences):
    hasher = PrefixHasher()
    for tokens in sequences:  # the table of powers grows between them
        assert hasher.prefixes(np.array(tokens, dtype=np.int32)).tolist() == by_hand(tokens)
