"""How long the transport thread sleeps between two polls that found nothing."""

import pytest

from prefixkv.config import TransportConfig
from prefixkv.transport.nixl.loop import pause_s

CONFIG = TransportConfig(spin_s=0.001, sleep_s=0.0001, idle_sleep_s=0.001)


@pytest.mark.parametrize(
    ("quiet_s", "sending", "receiving"),
    [
        (0.0, 0.0, 0.0),
        (0.0009, 0.0, 0.0),
        (0.0015, 0.0001, 0.0001),
        (0.016, 0.001, 0.001),
        (0.064, 0.001, 0.002),
        (0.8, 0.001, 0.025),
        (10.24, 0.01, 0.025),
        (60.0, 0.025, 0.025),
    ],
)
def test_it_sleeps_longer_the_longer_it_is_quiet_and_sooner_where_it_only_receives(
    quiet_s, sending, receiving
):
    assert pause_s(CONFIG, quiet_s, sending=True) == sending
    assert pause_s(CONFIG, quiet_s, sending=False) == receiving


def test_without_a_sleep_that_is_idle_it_never_sleeps():
    config = TransportConfig(spin_s=0.0, sleep_s=0.0, idle_sleep_s=0.0)
    assert pause_s(config, 60.0, sending=False) == 0.0
