"""A router that follows one worker's batches, naively, and refuses what any of the known routers
refuses. The folder protects what routers hear of a cache; how a cache records its changes:
../cache.

The rules, of llm-d-router (`pkg/kvevents`), Dynamo (`lib/kv-router/src/zmq_wire`), vLLM's and
SGLang's own decoders, and smg: a batch is an array of three; an event a map with a type; every key
that a decoder demands is there; hashes are integers and never 0; a run is dense, no hash in it
twice, and its parent is known; nothing is stored twice or removed unless it is there.
"""

from typing import Any

import msgspec
import numpy as np
import zmq

from prefixkv.cache.radix_key import Namespace
from tests.support.patience import PATIENCE_S

END = b"\xff" * 8
DEMANDED = {
    "BlockStored": {
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name",
    },
    "BlockRemoved": {"block_hashes", "medium"},
    "AllBlocksCleared": set(),
}  # fmt: skip
KNOWN = {"type", "extra_keys", "cache_salt"}


class Follower:
    """What one worker holds, by its batches. `next_seq` is None until one is known.

    `media`: those that the worker has; `blocks` are of the first. With `groups` events name theirs:
    0 has all attention, and a block of group 1 says that computing can go on behind the block of
    group 0 with its hash.
    """

    def __init__(
        self,
        page_size: int,
        media: tuple[str, ...] = ("GPU",),
        groups: bool = False,
        next_seq: int | None = None,
    ) -> None:
        self.page_size = page_size
        self.groups = groups
        self.checkpoints: dict[int, Any] = {}  # by hash, what `blocks` has of it
        self.next_seq = next_seq
        self.num_events = 0
        # By medium; hash: its parent's; what a router looks up by
        self.held: dict[str, dict[int, tuple[int | None, Any]]] = {one: {} for one in media}
        self.blocks = self.held[media[0]]

    def take(self, seq: int, payload: bytes) -> bool:
        """Follow a batch. False: something before it is missing, and it was not read."""
        if self.next_seq is not None and seq < self.next_seq:
            return True
        if self.next_seq != seq:
            return False
        self.apply(payload)
        self.next_seq = seq + 1
        return True

    def restart(self, seq: int, payload: bytes) -> None:
        """Take a batch that needs none before it."""
        events = msgspec.msgpack.decode(payload)[1]
        assert events[0]["type"] == "AllBlocksCleared"
        self.apply(payload)
        self.next_seq = seq + 1

    def apply(self, payload: bytes) -> None:
        batch = msgspec.msgpack.decode(payload)
        assert isinstance(batch, list)
        assert len(batch) == 3
        ts, events, rank = batch
        assert isinstance(ts, float)
        assert type(rank) is int
        for event in events:
            self.num_events += 1
            demanded, known = DEMANDED[event["type"]], KNOWN
            if self.groups and demanded:
                demanded = demanded | {"group_idx"}
                if event["type"] == "BlockStored":
                    demanded = demanded | {"kv_cache_spec_kind"}
            assert demanded <= event.keys() <= demanded | known
            if event.get("group_idx"):
                self._checkpoint(event)
                continue
            match event["type"]:
                case "BlockStored":
                    self._stored(event)
                case "BlockRemoved":
                    self._removed(event)
                case _:
                    self.checkpoints.clear()
                    for blocks in self.held.values():
                        blocks.clear()

    def _checkpoint(self, event: dict[str, Any]) -> None:
        assert event["group_idx"] == 1
        [one] = event["block_hashes"]
        if event["type"] == "BlockRemoved":
            del self.checkpoints[one]
            return
        assert event["kv_cache_spec_kind"] == "mamba"
        assert one not in self.checkpoints, "stored twice"
        # It says of its block what the block itself said.
        known = self.blocks.pop(one)
        self._stored(event)
        assert self.blocks[one] == known
        self.checkpoints[one] = known

    def _stored(self, event: dict[str, Any]) -> None:
        hashes, parent = event["block_hashes"], event["parent_block_hash"]
        tokens, size = event["token_ids"], event["block_size"]
        assert hashes
        assert all(type(one) is int and 0 < one < 2**64 for one in hashes)
        assert len({*hashes, parent}) == len(hashes) + 1
        blocks = self.held[event["medium"]]
        assert parent is None or parent in blocks
        assert not blocks.keys() & set(hashes), "stored twice"
        assert size == self.page_size
        assert len(tokens) == len(hashes) * size
        assert all(type(token) is int and 0 <= token < 2**31 for token in tokens)
        assert event["lora_id"] is None
        keys = event.get("extra_keys") or [None] * len(hashes)
        assert len(keys) == len(hashes)
        for number, one in enumerate(hashes):
            images = [tuple(key) for key in keys[number] or () if isinstance(key, list)]
            page = tuple(tokens[number * size : (number + 1) * size])
            blocks[one] = (
                parent, (page, event.get("lora_name"),
                         event.get("cache_salt"), tuple(images)),
            )  # fmt: skip
            parent = one

    def _removed(self, event: dict[str, Any]) -> None:
        blocks = self.held[event["medium"]]
        assert event["block_hashes"]
        for one in event["block_hashes"]:
            assert one not in self.checkpoints, "its checkpoint is still there"
            del blocks[one]
        parents = {parent for parent, _ in blocks.values()}
        assert not parents & set(event["block_hashes"]), "what followed them is still there"

    def matched(
        self, tokens: Any, namespace: Namespace | None = None, medium: str | None = None
    ) -> int:
        """Tokens of a prompt that the worker holds in the first medium, or in this one, as a router
        finds them: by their own words."""
        return len(self._path(tokens, namespace, medium)) * self.page_size

    def resumed(self, tokens: Any, namespace: Namespace | None = None) -> int:
        """Tokens of a prompt behind which the worker can go on computing."""
        path = self._path(tokens, namespace, None)
        ends = [number for number, one in enumerate(path, 1) if one in self.checkpoints]
        return max(ends, default=0) * self.page_size

    def _path(self, tokens: Any, namespace: Namespace | None, medium: str | None) -> list[int]:
        below: dict[int | None, dict[Any, int]] = {}
        blocks = self.blocks if medium is None else self.held[medium]
        for one, (parent, what) in blocks.items():
            below.setdefault(parent, {})[what] = one
        lora, salt, images = namespace or (None, None, ())
        tokens = np.asarray(tokens).tolist()
        at: int | None = None
        path: list[int] = []
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            end = start + self.page_size
            inside = tuple(
                (image.identifier, image.start - start)
                for image in images
                if image.start < end and start < image.start + image.length
            )
            what = tuple(tokens[start:end]), lora, salt, inside
            if what not in below.get(at, {}):
                break
            at = below[at][what]
            path.append(at)
        return path


class Subscriber:
    """A SUB beside a DEALER for repeats and a REQ for snapshots, and a follower that uses them."""

    def __init__(
        self,
        publisher: Any,
        page_size: int,
        queue: int = 0,
        media: tuple[str, ...] = ("GPU",),
        groups: bool = False,
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.follower = Follower(page_size, media, groups)
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.RCVHWM, queue)
        if queue:
            self.sub.setsockopt(zmq.RCVBUF, 4096)
        self.sub.setsockopt(zmq.RECONNECT_IVL, 20)
        self.sub.subscribe("kv@")
        self.sub.connect(publisher.endpoint)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(publisher.replay_endpoint)
        self.req = self.context.socket(zmq.REQ)
        self.req.connect(publisher.snapshot_endpoint)
        self.num_gaps = 0

    def receive(self, sock: zmq.Socket[bytes]) -> list[bytes]:
        assert sock.poll(int(PATIENCE_S * 1000)), "nothing came"
        return sock.recv_multipart()

    def event(self) -> tuple[bytes, int, bytes]:
        topic, number, payload = self.receive(self.sub)
        return topic, int.from_bytes(number[:8]), payload

    def replay(self, seq: int) -> list[tuple[int, bytes]]:
        """All that is answered to a request for what there is from a number on."""
        self.dealer.send_multipart([b"", seq.to_bytes(8)])
        answers = []
        while True:
            empty, *frames = self.receive(self.dealer)
            assert empty == b""
            *topic, number, payload = frames
            assert len(topic) == 1
            if not payload:
                assert number == END
                return answers
            answers.append((int.from_bytes(number[:8]), payload))

    def snapshot(self) -> tuple[int, bytes, bytes]:
        """Its number, the life, and a batch."""
        self.req.send(b"snapshot")
        number, life, payload = self.receive(self.req)
        return int.from_bytes(number, signed=True), life, payload

    def follow(self) -> None:
        """Take one event in, and where something is missing, all that is."""
        _, seq, payload = self.event()
        if self.follower.take(seq, payload):
            return
        self.num_gaps += 1
        for at, more in self.replay(self.follower.next_seq or 0):
            if not self.follower.take(at, more):
                self.follower.restart(at, more)

    def follow_until(self, seq: int) -> None:
        while (self.follower.next_seq or 0) <= seq:
            self.follow()

    def close(self) -> None:
        self.context.destroy(linger=0)
