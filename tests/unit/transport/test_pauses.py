"""How long the transport thread sleeps between two polls that found nothing."""

import pytest

from prefixkv.config import TransportConfig
from prefixkv.transport.nixl.loop import pause_s

CONFIG = TransportConfig(polling=5)  # 250 us, 150 us, 1 ms


@pytest.mark.parametrize(
    ("quiet_s", "sending", "receiving"),
    [
        (0.0, 0.0, 0.0),
        (0.0002, 0.0, 0.0),
        (0.0015, 0.00015, 0.00015),
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
    assert pause_s(CONFIG, quiet_s, sending=True) == pytest.approx(sending)
    assert pause_s(CONFIG, quiet_s, sending=False) == pytest.approx(receiving)


def test_polling_of_0_never_sleeps():
    config = TransportConfig(polling=0)
    assert pause_s(config, 60.0, sending=False) == 0.0
