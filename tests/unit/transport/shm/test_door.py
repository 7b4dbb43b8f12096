"""Who gets in at the door of a shm transport, and what is left of one that does not."""

import mmap
import os
import secrets
import select
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixkv.errors import ConfigError, HandshakeError
from prefixkv.memory.kv_layout import ADDRESS_END
from prefixkv.memory.kv_pool import SharedBlock, block_of
from prefixkv.protocol.ids import MAX_SUMS, SUM_BYTES, TAG_BYTES, ChunkTag, PeerId
from prefixkv.runtime import rank_spec
from prefixkv.transport.base import RankMemory, WriteDone
from prefixkv.transport.shm import wire as shm_wire
from prefixkv.transport.shm.loop import ShmTransport
from prefixkv.transport.shm.wire import (
    MAGIC,
    TOKEN_BYTES,
    ShmListener,
    ShmOffer,
    hand_over,
    pack_offer,
    read_offer,
    tags_of,
    take,
)
from tests.support.patience import PATIENCE_S, until
from tests.support.shm_liar import num_descriptors
from tests.support.transport_driver import Node, ShmDriver
from tests.support.transport_pools import make_pool, shared_zeros

TAG = ChunkTag(incarnation=1, room=7, generation=0, rank=0, chunk=2).pack()


def offer_of(target: Node) -> ShmOffer:
    return msgspec.msgpack.decode(target.transport.metadata[len(MAGIC) :], type=ShmOffer)


def stranger_at(target: Node) -> socket.socket:
    """Has connected, and said nothing."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(PATIENCE_S)
    stranger.connect("\0prefixkv-shm-" + offer_of(target).door)
    return stranger


def answer_to(stranger: socket.socket, *words: bytes) -> bytes:
    """What comes back; b"": it was turned away."""
    try:
        for word in words:
            stranger.send(word)
        return stranger.recv(1 << 16)
    except (BrokenPipeError, ConnectionResetError):
        return b""


def write_one(driver: ShmDriver, writer: Node, target: Node, number: int) -> None:
    writer.transport.write(writer.job(number, target, [number], [number]))
    driver.until(lambda: writer.ends(number) and len(target.tags()) >= number)
    assert isinstance(writer.ends(number)[0], WriteDone)


# --- who it is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [1, -1])
def test_another_user_gets_nothing_and_is_given_nothing(
    driver: ShmDriver, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    writer, target = driver.node("prefill"), driver.node("decode")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + more)
    writer.add(target)
    event = driver.unreachable(writer)
    assert event.error.field == "user"
    with stranger_at(target) as stranger:  # also one that has the token
        assert answer_to(stranger, MAGIC + offer_of(target).token) == b""


def test_tokens_are_drawn_and_those_of_others_are_no_good(driver: ShmDriver) -> None:
    one, two = offer_of(driver.node("decode")), offer_of(driver.node("decode"))
    assert len(one.token) == TOKEN_BYTES
    assert len({one.token, two.token, bytes(TOKEN_BYTES)}) == 3
    assert one.door != two.door


WRONG: dict[str, Any] = {
    "nothing like it": lambda token: [b"x" * 5000],
    "another": lambda token: [MAGIC + bytes(TOKEN_BYTES)],
    "the last byte": lambda token: [MAGIC + token[:-1] + bytes([token[-1] ^ 1])],
    "the first byte": lambda token: [MAGIC + bytes([token[0] ^ 1]) + token[1:]],
    "too short": lambda token: [MAGIC + token[:-1]],
    "too long": lambda token: [MAGIC + token + b"x"],
    "without the magic": lambda token: [token],
    "tags": lambda token: [TAG],
    "tags, then the token": lambda token: [TAG, MAGIC + token],
}


@pytest.mark.parametrize(
    "words", [pytest.param(one, marks=() if "last" in one else pytest.mark.slow) for one in WRONG]
)
def test_without_the_token_nothing_is_handed_out_and_others_go_on(
    driver: ShmDriver, words: str
) -> None:
    writer, target = driver.pair()
    write_one(driver, writer, target, 1)
    before = num_descriptors()
    with stranger_at(target) as stranger:
        assert answer_to(stranger, *WRONG[words](offer_of(target).token)) == b""
    until(lambda: num_descriptors() == before)
    write_one(driver, writer, target, 2)
    assert {tag.room for tag in target.tags()} == {1, 2}


@pytest.mark.parametrize("words", [b"short", b"\0" * 40, TAG + b"\0"])
def test_a_writer_whose_words_are_no_tags_is_dropped_and_others_go_on(
    driver: ShmDriver, words: bytes
) -> None:
    writer, target = driver.pair()
    write_one(driver, writer, target, 1)
    with stranger_at(target) as stranger:
        assert answer_to(stranger, MAGIC + offer_of(target).token).startswith(MAGIC)
        assert answer_to(stranger, words) == b""
    write_one(driver, writer, target, 2)


def test_a_packet_of_tags_is_one_that_the_door_reads_whole() -> None:
    assert TAG_BYTES + MAX_SUMS * SUM_BYTES <= shm_wire.MAX_PACKET_BYTES
    tags = [TAG, ChunkTag(1, 7, 0, 0, 3, sums=bytes(MAX_SUMS * SUM_BYTES)).pack(), TAG]
    assert tags_of(b"".join(tags)) == tags
    for packet in (b"", TAG[:-1], TAG + tags[1][:-1]):
        with pytest.raises(HandshakeError, match="bytes of tags"):
            tags_of(packet)


def links_of(target: Node) -> set[str]:
    """The kernel's numbers of the sockets that this node's door has accepted."""
    name = "@prefixkv-shm-" + offer_of(target).door
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {
        inode for *_, flags, _, _, inode, path in (row for row in rows if row[-1] == name)
        if inode != "0" and not int(flags, 16) & 0x10000  # it is not in the queue, and no listener
    }  # fmt: skip


def test_a_writer_that_leaves_its_answer_unread_is_dropped(
    driver: ShmDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel says so by another error than the end."""
    target = driver.node("decode")
    with stranger_at(target) as writer:
        writer.send(MAGIC + offer_of(target).token)
        until(lambda: select.select([writer], [], [], 0)[0])
        assert links_of(target)
    until(lambda: not links_of(target))
    assert not caplog.records


def test_a_stranger_that_has_left_again_is_not_missed() -> None:
    with select.epoll() as epoll:
        door = ShmListener(PeerId("d", 1), [], [], epoll)
        try:
            assert door.on_ready(door._listener.fileno(), lambda tag: None)
        finally:
            door.close()


# --- what stays open ------------------------------------------------------------------------------


def refused() -> None:
    raise OSError("there are none")


@pytest.mark.slow
@pytest.mark.parametrize("step", ["listen", "pack_offer"])
def test_a_transport_that_cannot_start_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    pool = make_pool("layer_major", 4, zeros=shared_zeros)
    before = num_descriptors()
    monkeypatch.setattr(shm_wire, step, lambda *args: refused())
    with pytest.raises(ConfigError, match="there are none") as caught:
        ShmTransport(PeerId("d", 1), RankMemory(pool.layout), lambda event: None)
    del caught
    assert num_descriptors() == before


def test_a_door_whose_name_is_taken_leaves_nothing_open() -> None:
    name = secrets.token_hex()  # the machine's, like all abstract sockets
    with shm_wire.listen(name):
        before = num_descriptors()
        with pytest.raises(OSError, match="in use"):
            shm_wire.listen(name)
        assert num_descriptors() == before


@pytest.mark.slow
def test_no_more_blocks_are_taken_than_ranges_were_named() -> None:
    memory = shared_zeros((mmap.PAGESIZE,))
    block = block_of(memory.ctypes.data, 1)
    blocks = [block._replace(address=at * block.num_bytes) for at in range(1, 11)]
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ends[0], ends[1]:
        for max_ranges in (10, 2):
            hand_over(ends[0], blocks, [taken[:2] for taken in blocks[:max_ranges]])
            before = num_descriptors()
            if max_ranges == 10:
                shm_wire.close_all(taken.fd for taken in take(ends[1], max_ranges)[0])
            else:
                with pytest.raises(HandshakeError):
                    take(ends[1], max_ranges)
            assert num_descriptors() == before


@pytest.mark.slow
@pytest.mark.parametrize(("magic", "is_taken"), [(MAGIC, True), (b"pkvshm2|", False)])
def test_an_answer_of_another_version_is_refused(magic: bytes, is_taken: bool) -> None:
    memory = shared_zeros((mmap.PAGESIZE,))
    block = block_of(memory.ctypes.data, 1)
    words = magic + msgspec.msgpack.encode(([block[:2]], [block[:2]]))
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ends[0], ends[1]:
        before = num_descriptors()
        socket.send_fds(ends[0], [words], [block.fd])
        if is_taken:
            shm_wire.close_all(taken.fd for taken in take(ends[1], 7)[0])
        else:
            with pytest.raises(HandshakeError, match="pkvshm2"):
                take(ends[1], 7)
        assert num_descriptors() == before


def test_descriptors_do_not_go_to_programs_that_this_process_starts() -> None:
    pool = make_pool("layer_major", 4, zeros=shared_zeros)
    block = block_of(*pool.layout.regions[0])
    assert not os.get_inheritable(block.fd)
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ends[0], ends[1]:
        hand_over(ends[0], [block], [block[:2]])
        handed, _ = take(ends[1], 7)
    assert [fd.fd != block.fd for fd in handed] == [True]
    assert not any(os.get_inheritable(taken.fd) for taken in handed)
    shm_wire.close_all(taken.fd for taken in handed)


PAGE = mmap.PAGESIZE
TWO = [(PAGE, PAGE), (2 * PAGE, PAGE)]  # which touch
APART = [(PAGE, PAGE), (4 * PAGE, PAGE)]
PLACES: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]], str]] = {
    "whole blocks": (TWO, TWO, ""),
    "in any order": (TWO[::-1], APART[:1], ""),
    "the last bytes": (APART, [(2 * PAGE - 1, 1), (5 * PAGE - 1, 1)], ""),
    "blocks that overlap by a byte": ([(PAGE, PAGE + 1), TWO[1]], [], "shm block"),
    "and the later one first": ([TWO[1], (PAGE, PAGE + 1)], [], "shm block"),
    "a block inside another": ([(PAGE, 9 * PAGE), TWO[1]], [], "shm block"),
    "the last address": ([(ADDRESS_END - PAGE - 1, PAGE)], [], ""),
    "beyond all addresses": ([(ADDRESS_END - PAGE, PAGE)], [], "shm block"),
    "a range that ends a byte later": (APART, [(PAGE, PAGE + 1)], "shm range"),
    "behind the last": (APART, [(4 * PAGE, PAGE + 1)], "shm range"),
    "that begins a byte sooner": (APART, [(PAGE - 1, 2)], "shm range"),
    "between two": (APART, [(3 * PAGE, 1)], "shm range"),
    "across two": (TWO, [(PAGE, 2 * PAGE)], "shm range"),  # they are mapped apart
    "the second of two": (APART, [APART[0], (PAGE, 4 * PAGE)], "shm range"),
}


@pytest.mark.parametrize("where", PLACES)
def test_blocks_lie_apart_and_ranges_inside_one(where: str) -> None:
    blocks, ranges, field = PLACES[where]
    handed = [SharedBlock(*block, fd=-1) for block in blocks]
    with nullcontext() if not field else pytest.raises(HandshakeError, match=field):
        shm_wire._check_places(handed, ranges)


# --- offers ---------------------------------------------------------------------------------------


def test_the_place_is_the_kernels() -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    space = os.stat("/proc/self/ns/net").st_ino
    assert rank_spec.place_of() == f"{boot} net {space} user {os.geteuid()}"


@pytest.mark.parametrize(
    "change", [{"token": b""}, {"token": bytes(31)}, {"token": bytes(33)}, {"door": ""}], ids=str
)
def test_an_offer_that_is_none_is_refused(driver: ShmDriver, change: dict[str, Any]) -> None:
    target = driver.node("decode")
    offer = msgspec.structs.replace(offer_of(target), **change)
    with pytest.raises(HandshakeError, match="shm offer"):
        read_offer(pack_offer(offer), target.me)


def test_an_offer_of_another_version_is_refused(driver: ShmDriver) -> None:
    target = driver.node("decode")
    raw = target.transport.metadata
    assert read_offer(raw, target.me) == offer_of(target)
    assert raw.startswith(b"pkvshm1|")
    with pytest.raises(HandshakeError, match="shm offer"):
        read_offer(b"pkvshm2|" + raw[len(MAGIC) :], target.me)
