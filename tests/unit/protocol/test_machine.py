"""How a table's step is taken, and the diagram that is drawn of the table."""

import pytest

from prefixkv.errors import InternalError
from prefixkv.protocol.ids import KVPoll
from prefixkv.protocol.machine import Step, Table, ignored, run
from prefixkv.protocol.receiver_machine import ReceiverMachine
from prefixkv.protocol.sender_machine import SenderMachine
from tests.unit.protocol.rooms import KEY, drawn


class Switch:
    """A machine of one event, an int: it goes to the state of that number."""

    key = KEY

    def __init__(self) -> None:
        self.poll = KVPoll.BOOTSTRAPPING

    def go(self, event: int, now_s: float) -> list[str]:
        self.poll = KVPoll(event)
        return [f"at {now_s}"]

    TABLE: Table = {
        KVPoll.BOOTSTRAPPING: {int: Step(go, {KVPoll.FAILED}), **ignored(str)},
        KVPoll.FAILED: {},
    }


def test_a_step_into_a_state_that_is_not_listed_is_our_fault() -> None:
    with pytest.raises(InternalError, match="int led from BOOTSTRAPPING to SUCCESS"):
        run(Switch(), Switch.TABLE, 3, 0.0)


@pytest.mark.parametrize("machine", [ReceiverMachine, SenderMachine])
def test_the_page_of_messages_draws_all_of_a_table_but_the_methods(
    machine: type[ReceiverMachine] | type[SenderMachine],
) -> None:
    assert drawn(machine.__name__) == {
        state: {event.__name__: set(step.next_states) for event, step in row.items()}
        for state, row in machine.TABLE.items()
    }
