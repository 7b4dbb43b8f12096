"""The deque of a control object: what one input says is handled to its end, in order."""

from typing import Any, ClassVar

from prefixkv.control.effects import FrameFailed, FrameReceived, Raised
from prefixkv.control.inbox import ControlInbox, Takes
from tests.unit.protocol.rooms import PREFILL, TIMING


class _Counting(ControlInbox):
    """Says the numbers below an input, each of which says itself as an effect; 3 raises."""

    def _count(self, number: int, now_s: float) -> None:
        for below in range(number):
            self.say(str(below))
        self.say(f"all of {number}")

    def _text(self, text: str, now_s: float) -> None:
        if text == "3":
            raise ZeroDivisionError(text)
        self._out.append(text)

    def _frame(self, frame: FrameReceived[str], now_s: float) -> None:
        for item in ("before", "3", "after"):
            self.say(item)

    def _failed(self, failed: FrameFailed[str], now_s: float) -> None:
        self.say("the end")
        raise OSError("nor can it be ended")

    INPUTS: ClassVar[Takes] = {int: _count, FrameReceived: _frame, FrameFailed: _failed}
    INSIDE: ClassVar[Takes] = {str: _text}


def counting() -> _Counting:
    return _Counting(PREFILL, TIMING)


def texts(effects: list[Any]) -> list[str]:
    return [str(one.error) if isinstance(one, Raised) else one for one in effects]


def test_what_is_said_is_taken_in_order_and_an_exception_ends_its_item_alone() -> None:
    inbox = counting()
    assert texts(inbox.on(2, 0.0)) == ["0", "1", "all of 2"]
    effects = inbox.on(5, 0.0)
    assert texts(effects) == ["0", "1", "2", "3", "4", "all of 5"]
    assert [one.source for one in effects if isinstance(one, Raised)] == [None]
    assert texts(inbox.on(1, 0.0)) == ["0", "all of 1"], "nothing is left of the input before"


def test_a_frame_that_raises_fails_once_behind_what_it_said() -> None:
    effects = counting().on(FrameReceived("p", b""), 0.0)
    assert texts(effects) == ["before", "3", "after", "nor can it be ended", "the end"]
    assert {one.source for one in effects if isinstance(one, Raised)} == {"p"}
