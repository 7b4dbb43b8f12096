"""The lock-leak machine, a short run; `fuzz/lock_leaks.py` is the long one."""

import pytest
from hypothesis import settings

from tests.laws.lock_machine import LockMachine

TestLockLeaks = LockMachine.TestCase
TestLockLeaks.pytestmark = [pytest.mark.slow]  # type: ignore[attr-defined]
TestLockLeaks.pytestmark = [pytest.mark.slow]  # type: ignore[attr-defined]
TestLockLeaks.settings = settings(max_examples=150, stateful_step_count=50)
