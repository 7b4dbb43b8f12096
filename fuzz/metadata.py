"""Invariant tested: whatever bytes a peer sends as its NIXL metadata, the prefill node that hears
them lives, and goes on serving an honest decode worker.

    python fuzz/metadata.py --changes 1000 [--seed 1] [--shaped] [--unchecked]

`--shaped` changes fields inside the form, instead of bytes at random. Then some 500 changes are
enough for a seed: UCX has room for 254 kinds of peers, and refuses more. `--unchecked` leaves the
check of the form out before the trial process, so that everything reaches that.
"""

from __future__ import annotations

import argparse
import logging
import pathlib
import random
import sys
import time
from collections import Counter

import zmq

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.runtime.decode_node import DecodeNode
from prefixkv.runtime.prefill_node import PrefillNode
from prefixkv.transport.metadata import trial
from tests.models.node_pair import NodePair, make_pool, tokens_of
from tests.models.ucx_shapes import shaped
from tests.runtime.conftest import QUICK
from tests.runtime.test_hostile_metadata import Attacker

_SERVED_EVERY = 50


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--changes", type=int, default=1000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--shaped", action="store_true")
    arguments.add_argument("--unchecked", action="store_true")
    chosen = arguments.parse_args()
    logging.disable()  # a line for each refusal
    if chosen.unchecked:
        trial.check_metadata = lambda *_: None
    rng = random.Random(chosen.seed)
    ends: Counter[str] = Counter()
    slowest_s = 0.0
    with (
        PrefillNode(make_pool(), PrefillConfig(control=QUICK)) as prefill,
        DecodeNode(make_pool(), DecodeConfig(control=QUICK)) as decode,
        DecodeNode(make_pool(), DecodeConfig("other")) as other,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as sock,
    ):
        pair = NodePair(decode, prefill)
        attacker = Attacker(prefill.endpoint, sock, other)
        for number in range(chosen.changes):
            me, changed = attacker.life(number)
            if chosen.shaped:
                changed = bytearray(shaped(bytes(changed), rng))
            else:
                _change_bytes(changed, attacker.address_at if number % 2 else 0, rng)
            start_s = time.monotonic()
            refused = attacker.reply_to(bytes(changed), me).refused
            slowest_s = max(slowest_s, time.monotonic() - start_s)
            ends[_kind(refused)] += 1
            if number % _SERVED_EVERY == 0:
                pair.submit(f"r{number}", tokens_of(number, 12))
                pair.run(f"r{number}")
                assert pair.d.ended[f"r{number}"] is None
    print(f"{chosen.changes} changes, seed {chosen.seed}: the serving process lived")
    print(f"slowest answer {slowest_s:.2f} s; {dict(ends)}")


def _change_bytes(changed: bytearray, start: int, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        changed[rng.randrange(start, len(changed))] = rng.randrange(256)


def _kind(refused: str) -> str:
    if not refused:
        return "taken"
    if "ended the child" in refused:
        return "the child died"
    return "NIXL refused it" if "its trial failed" in refused else "not of the known form"


if __name__ == "__main__":
    main()
