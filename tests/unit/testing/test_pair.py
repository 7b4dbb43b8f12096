"""A pair of nodes in one process: what decode's engine sees of a prefill that writes real bytes."""

import numpy as np
import pytest

from prefixkv.errors import AbortedError
from prefixkv.memory.mesh import Mesh
from prefixkv.testing.hashing import PrefixHasher, sample
from prefixkv.testing.pair import NodePair
from tests.support.patience import PATIENCE_S

TOKENS = np.arange(100, dtype=np.int32)


def answer(pair, req, count):
    """The caller's engine: it only counts tokens."""
    pair.decode.append_many([req], [int(np.frombuffer(req.aux, np.int32)[0])])
    for token in range(count - 1):
        pair.decode.append_many([req], [token])
    pair.decode.finish(req)


@pytest.mark.slow
@pytest.mark.parametrize("prefill_mesh", [None, Mesh(2, 2, tp_size=2)])
def test_the_bytes_are_right_and_a_later_turn_finds_them(prefill_mesh):
    with NodePair(prefill_mesh=prefill_mesh) as pair:
        pair.submit("a", TOKENS, room=1, max_new_tokens=4)
        (req,) = pair.arrived(PATIENCE_S)
        assert (req.rid, req.prefix_len, pair.count_wrong_pages(req)) == ("a", 0, 0)
        assert req.aux == sample(PrefixHasher().prefixes(TOKENS)[-1:]).tobytes()
        answer(pair, req, 1)
        pair.submit("b", np.append(TOKENS, TOKENS), room=2, max_new_tokens=4)
        (req,) = pair.arrived(PATIENCE_S)
        assert (req.prefix_len, pair.count_wrong_pages(req)) == (96, 0)
        assert (pair.prefill.prompt_tokens, pair.prefill.hit_tokens) == (300, 96)
        answer(pair, req, 2)


def test_wrong_bytes_are_counted():
    with NodePair() as pair:
        req = pair.submit("a", TOKENS, room=1)
        assert pair.arrived(PATIENCE_S) == [req]
        pair.decode.pool.write_pages(req.pages[:1], pair.decode.pool.read_pages(req.pages[1:2]))
        assert pair.count_wrong_pages(req) == 1
        answer(pair, req, 1)


def test_what_does_not_arrive_is_an_error():
    with NodePair() as pair:
        with pytest.raises(TimeoutError, match="nothing has arrived"):
            pair.arrived(patience_s=0.0)
        pair.submit("a", TOKENS, room=1)
        pair.decode.abort("a")
        with pytest.raises(AbortedError):
            pair.arrived(PATIENCE_S)
