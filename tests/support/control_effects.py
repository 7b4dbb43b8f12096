"""What a control object does about an input, where it may not raise, and what it holds."""

from typing import Any

from prefixkv.control.effects import Raised
from prefixkv.control.prefill.control import PrefillControl


def effects_of(control: Any, what: Any, now_s: float) -> list[Any]:
    """Return the effects. Raises what taking the input has raised."""
    effects: list[Any] = control.on(what, now_s)
    for effect in effects:
        if isinstance(effect, Raised):
            raise effect.error
    return effects


def leftovers_of(control: Any) -> dict[str, Any]:
    """What a control object has to have given up at rest, where it has not."""
    left: dict[str, Any] = {"rooms": list(control._rooms.all())}
    if isinstance(control, PrefillControl):
        peers = control._peers.all()
        left |= {
            "jobs": dict(control._rooms.jobs), "awaited": control._tombs.awaited(),
            "parked": [peer.id for peer in peers if peer.num_parked],
            "promised": [peer.id for peer in peers if peer.num_promised],
            "rooms of peers": [peer.id for peer in peers if control._rooms.of(peer.id)],
        }  # fmt: skip
    else:
        left |= {
            "expected": control._rooms.num_expected,
            "rooms of links": [link.address for link in control._links.all() if link.waiting],
        }  # fmt: skip
    return {name: what for name, what in left.items() if what}
