"""Hypothesis profiles: `ci` (derandomised, the default), `dev` (random), `fuzz` (long). Every node
checks that one thread uses it, also those of the processes that tests start."""

import gc
import os

from hypothesis import HealthCheck, settings

import prefixkv.assembly  # noqa: F401 - parts that are left out unless this is imported

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=_CHECKS,
)
settings.register_profile("dev", deadline=None, max_examples=200, suppress_health_check=_CHECKS)
settings.register_profile(
    "fuzz", deadline=None, max_examples=2000, stateful_step_count=100, suppress_health_check=_CHECKS
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

os.environ.setdefault("PREFIXKV_DEBUG", "1")


def pytest_collection() -> None:
    """What is imported stays, and garbage collections would look at all of it, now and in each
    test: that took a seventh of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
