"""Where the time of a full hit goes, hand by hand: two nodes on NIXL as in `claim_idle`, on an idle
pair, with a clock at each place where one thread hands on to the next. With pauses of 10 ms between
two requests, as an idle pair has them, and with none; and the time of a fixed loop just before each
request, since a core that was idle is slow at first.

Beside it, what the handing on takes alone: as many threads, inboxes and sockets, which pass on
messages of the same sizes and decide nothing.

Parts are medians over the requests, each from the mark before it; what they add up to may differ
from the P50 of the whole.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import numpy as np
import zmq

from benchmarks.claim_idle import Hits
from benchmarks.pair import Claim, Row, Stuck, Watch, run_pair
from prefixkv.wakeups import Inbox

_PROMISE_BYTES: Final = 400  # of frames that pages are not named in
_OUTCOME_BYTES: Final = 150

PARTS: Final = {
    "asked": "decode's engine: prefill's is told, `Request`, `add`, `pop_preallocated`",
    "decode woke": "its control thread wakes",
    "decode sends": "and handles the command",
    "prefill heard": "zmq, TCP, zmq, prefill's control thread wakes",
    "prefill says": "and handles the frame",
    "prefill has": "its engine wakes",
    "sent": "`send_chunk`",
    "prefill woke": "its control thread wakes again",
    "prefill sends": "and handles the command",
    "decode heard": "zmq, TCP, zmq, decode's control thread wakes",
    "decode says": "and handles the frame",
    "there": "its engine wakes",
}
"""By the mark that ends a part, in the order in which they come."""

Marks = list[tuple[float, str]]


@dataclass(frozen=True)
class Timed:
    """Calls of a node's control thread, with the time of each noted."""

    side: str
    marks: Marks

    def watch(self, node: Any) -> None:
        thread = node.transfers.thread
        channel, events = thread.channel, thread.events
        poll, send, put = channel.poll, channel.send, events.put

        def polled(timeout_s: float) -> Any:
            frames = poll(timeout_s)
            self.note(f"{self.side} {'heard' if frames else 'woke'}")
            return frames

        channel.poll = polled
        channel.send = self._before(send, "sends")
        events.put = self._before(put, "says")

    def _before(self, call: Callable[..., None], what: str) -> Callable[..., None]:
        def noted(*args: Any) -> None:
            self.note(f"{self.side} {what}")
            call(*args)

        return noted

    def note(self, mark: str) -> None:
        self.marks.append((time.monotonic(), mark))


def prefill_side(pipe: Connection, _watch: Watch, case: Hits) -> None:
    from prefixkv.request import Request
    from prefixkv.runtime.prefill_node import PrefillNode

    prompt, timed = case.prompt(), Timed("prefill", [])
    with PrefillNode(case.pool()) as node:
        timed.watch(node)
        pipe.send(node.endpoint)
        while True:
            for ready in wait([pipe, node.fileno()], 1.0):
                if ready is not pipe:
                    continue
                if (room := pipe.recv()) is None:
                    pipe.send(timed.marks)
                    return
                node.add(Request(f"r{room}", prompt, room=room, decode="decode-0"))
            for req in node.pop_bootstrapped():
                timed.note("prefill has")
                node.send_chunk(req, req.num_tokens, last=True, aux=b"token")
                timed.note("sent")
            node.pop_sent()
            assert not node.pop_failed()


def decode_side(pipe: Connection, _watch: Watch, case: Hits) -> Row:
    from prefixkv.request import Request
    from prefixkv.runtime.decode_node import DecodeNode

    prompt, timed = case.prompt(), Timed("decode", [])
    spans: list[tuple[float, float]] = []
    loops_s: list[float] = []
    with DecodeNode(case.pool()) as node:
        timed.watch(node)
        stuck = Stuck(node)
        endpoint = pipe.recv()
        for room in range(case.requests + 1):
            if case.gap_s:
                time.sleep(case.gap_s)
            loops_s.append(_loop())
            began_s = time.monotonic()
            pipe.send(room)
            node.add(Request(f"r{room}", prompt, max_new_tokens=1, room=room, prefill=endpoint))
            node.pop_preallocated()
            timed.note("asked")
            stuck.moved()
            while not (arrived := node.pop_transferred()):
                stuck.wait()
            timed.note("there")
            spans.append((began_s, timed.marks[-1][0]))
            node.append_many(arrived, [7])
            node.finish(arrived[0])
        pipe.send(None)
        marks = sorted(timed.marks + pipe.recv())
    parts = [found for span in spans[1:] if (found := parts_of(marks, *span)) is not None]
    assert parts, "of no request did the marks come in order"
    medians = np.median(np.array(parts), 0) * 1e6
    return {
        "requests": len(spans) - 1,
        "in_this_order": len(parts),
        "pause_ms": case.gap_s * 1e3,
        "loop_us": round(float(np.median(loops_s)) * 1e6, 1),
        "p50_us": round(float(np.median([end - begin for begin, end in spans[1:]])) * 1e6),
        "parts_us": [
            {"what": what, "us": round(float(us))}
            for what, us in zip(PARTS.values(), medians, strict=True)
        ],
    }


def parts_of(marks: Marks, began_s: float, ended_s: float) -> list[float] | None:
    """Seconds of each part of one request, or None if its marks did not come in this order.

    >>> from itertools import count
    >>> marks = [(number / 4, mark) for number, mark in zip(count(1), PARTS)]
    >>> parts_of(marks, 0.0, 3.0) == [0.25] * len(PARTS)
    True
    >>> parts_of(marks[:-1], 0.0, 3.0)
    """
    left = iter([mark for mark in marks if began_s <= mark[0] <= ended_s])
    parts, last_s = [], began_s
    for wanted in PARTS:
        at_s = next((at_s for at_s, what in left if what == wanted), None)
        if at_s is None:
            return None
        parts.append(at_s - last_s)
        last_s = at_s
    return parts


def _loop() -> float:
    """Seconds of a thousand additions."""
    began_s = time.perf_counter()
    total = 0
    for number in range(1000):
        total += number
    return time.perf_counter() - began_s


# --- threads and sockets alone --------------------------------------------------------------------


class BareThread:
    """A thread that waits for its inbox and its socket at once, as a control thread does."""

    def __init__(self, sock: Any, on_item: Callable[[Any], None], on_frame: Callable[..., None]):
        self.inbox: Inbox[Any] = Inbox()
        self._sock, self._on_item, self._on_frame = sock, on_item, on_frame
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poller, goes_on = zmq.Poller(), True
        for fd in (self.inbox.fd, self._sock.FD):
            poller.register(fd, zmq.POLLIN)
        while goes_on:
            if not self._sock.get(zmq.EVENTS) & zmq.POLLIN:
                poller.poll()
            for item in self.inbox.drain():
                goes_on = goes_on and item is not None
                if item is not None:
                    self._on_item(item)
            with contextlib.suppress(zmq.Again):
                while True:
                    self._on_frame(*self._sock.recv_multipart(zmq.DONTWAIT))

    def close(self) -> None:
        self.inbox.put(None)
        self._thread.join()


def bare_prefill_side(pipe: Connection, _watch: Watch, _case: Hits) -> None:
    context, events = zmq.Context(), Inbox[bytes]()
    sock = context.socket(zmq.ROUTER)
    pipe.send(sock.bind_to_random_port("tcp://127.0.0.1"))

    def answer(item: Any) -> None:
        if item is not True:  # that is a request, of which nothing is sent
            sock.send_multipart((item, bytes(_OUTCOME_BYTES)))

    thread = BareThread(sock, answer, lambda route, _: events.put(route))
    while True:
        for ready in wait([pipe, events.fd], 1.0):
            if ready is pipe:
                if pipe.recv() is None:
                    thread.close()
                    context.destroy()
                    return
                thread.inbox.put(True)
        for route in events.drain():
            thread.inbox.put(route)


def bare_decode_side(pipe: Connection, _watch: Watch, case: Hits) -> Row:
    context, events = zmq.Context(), Inbox[bytes]()
    sock = context.socket(zmq.DEALER)
    sock.connect(f"tcp://127.0.0.1:{pipe.recv()}")
    thread = BareThread(sock, lambda _: sock.send(bytes(_PROMISE_BYTES)), events.put)
    took_s = []
    for room in range(case.requests + 1):
        if case.gap_s:
            time.sleep(case.gap_s)
        began_s = time.monotonic()
        pipe.send(room)
        thread.inbox.put(room)
        while not events.drain():
            events.wait(1.0)
        took_s.append(time.monotonic() - began_s)
    pipe.send(None)
    thread.close()
    context.destroy()
    return {
        "pause_ms": case.gap_s * 1e3,
        "p50_us": round(float(np.median(took_s[1:])) * 1e6),
    }


def measure(quick: bool) -> tuple[list[Claim], Row]:
    """The two turn about."""
    case = Hits(requests=10 if quick else 400)
    gaps_s = (case.gap_s, 0.0) * (1 if quick else 2)
    rows = [run_pair(decode_side, prefill_side, replace(case, gap_s=gap)) for gap in gaps_s]
    bare = [
        run_pair(bare_decode_side, bare_prefill_side, replace(case, gap_s=gap)) for gap in gaps_s
    ]
    claims = [
        Claim(what, f"P50, pauses of {row['pause_ms']:g} ms", row["p50_us"] / 1e3, "ms", None)
        for what, found in (("full hit", rows), ("its threads and sockets alone", bare))
        for row in found
    ]
    return claims, {"hits": rows, "threads_and_sockets_alone": bare}
