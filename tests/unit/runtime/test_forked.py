"""A process forked from one that has nodes: what it does to its copies harms nothing of the
parent's."""

from __future__ import annotations

import os
import warnings

from tests.support.node_pair import NodePair, tokens_of
from tests.support.patience import until


def ended(pid: int, codes: list[int]) -> bool:
    found, status = os.waitpid(pid, os.WNOHANG)
    if found:
        codes.append(os.waitstatus_to_exitcode(status))
    return bool(found)


def test_a_forked_child_that_closes_its_copies_leaves_the_parent_at_work(pair: NodePair) -> None:
    pair.submit("before", tokens_of(1, 10))
    pair.run("before")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for node in (pair.decode, pair.prefill):
                node.close()
                node.close()
            code = 0
        finally:
            os._exit(code)
    codes: list[int] = []
    until(lambda: ended(pid, codes))
    assert codes == [0]
    for rid in ("after", "again"):
        pair.submit(rid, tokens_of(2, 10))
        pair.run(rid)
        assert pair.d.ended[rid] is None
    assert pair.prefill.peers() == {pair.decode.peer_id: "ready"}
