"""The radix cache against its naive model, eviction for eviction, one machine per policy."""

import pytest
from hypothesis import settings

from tests.laws.radix_machine import POLICIES, RadixMachine

# The machines of the others take as long, and find the same kind of fault.
_FAST = ("adaptive", "lru")


def _machine(policy: str) -> type:
    case = type(f"Machine_{policy}", (RadixMachine,), {"policy": policy}).TestCase
    case.settings = settings(
        case.settings, max_examples=case.settings.max_examples // 2
    )  # there are ten of them
    if policy not in _FAST:
        case.pytestmark = [pytest.mark.slow]
    return case


for _policy in POLICIES:
    globals()[f"Test_{_policy.replace('-', '_')}"] = _machine(_policy)
