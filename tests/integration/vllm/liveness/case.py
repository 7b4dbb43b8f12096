"""What is explored: requests of clients, and the order in which they arrive at two servers."""

from tests.laws.liveness.play import Played

MAX_LEN_BLOCKS = 23  # of a request


class Case(Played, frozen=True):
    """One run. `paces` may be "a" or "b": only this server; frames lie. What a router has not
    learned yet arrives when it may.

    `chunk` is how many tokens a step computes, `share` how many of them one prompt may have; 0:
    all. `host` is decode's host memory; of its copies the share `copies_fail` fails. `flushes` is
    how often in a random step the connector's cache is reset, and `leaves` how often a client
    leaves whose blocks are loaded. `windows` are the tokens that the layers of each window group
    see. `states` are the modes in which servers a and b keep the states of two groups, "none",
    "align", or "checkpoint": align, in which a long step keeps a state on its way; (): the model
    has no state."""

    blocks: tuple[int, int] = (24, 24)
    chunk: int = 1024
    share: int = 0
    join: bool = True
    recompute_below: int = 0
    asynchronous: bool = False
    both: bool = False
    compute_below: int = 0
    host: str = ""
    copies_fail: float = 0.0
    flushes: float = 0.0
    leaves: float = 0.0
    windows: tuple[int, ...] = ()
    states: tuple[str, ...] = ()
