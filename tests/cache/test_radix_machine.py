"""The radix cache against its naive model, eviction for eviction, one machine a policy."""

from hypothesis import settings

from tests.models.radix_machine import POLICIES, RadixMachine


def _machine(policy: str) -> type:
    case = type(f"Machine_{policy}", (RadixMachine,), {"policy": policy}).TestCase
    case.settings = settings(
        case.settings, max_examples=case.settings.max_examples // 2
    )  # there are ten of them
    return case


for _policy in POLICIES:
    globals()[f"Test_{_policy.replace('-', '_')}"] = _machine(_policy)
