from __future__ import annotations

import pytest

from multinode.agent.facts.ethtool import fastest_mode, read_card_speed


def modes(*bits: int) -> bytes:
    return sum(1 << bit for bit in bits).to_bytes(16, "little")


# Bits as linux/ethtool.h numbers them. What a card is said to support has bits beside its speeds: ports, pause, FEC.
@pytest.mark.parametrize(
    ("mask", "gbit_per_s"),
    [
        (modes(0, 1, 2, 3, 4, 5, 6, 7, 13), 1.0),
        (modes(5, 6, 7, 13, 47), 2.5),
        (modes(5, 6, 7, 12, 47, 48), 10.0),
        (modes(12, 31, 32, 33, 10, 49, 50, 51), 25.0),
        (modes(23, 24, 25, 26, 29, 30), 40.0),
        (modes(12, 24, 32, 36, 37, 38, 39), 100.0),
        (modes(36, 62, 66), 200.0),
        (modes(62, 69, 89), 400.0),
    ],
)
def test_the_fastest_of_the_modes_is_taken(mask: bytes, gbit_per_s: float) -> None:
    assert fastest_mode(mask) == gbit_per_s


@pytest.mark.parametrize("mask", [b"", bytes(16), modes(6, 7, 13, 49), modes(110)])
def test_a_driver_that_names_no_speed_tells_none(mask: bytes) -> None:
    assert fastest_mode(mask) is None


@pytest.mark.parametrize("ifname", ["lo", "mn-nosuch0"])
def test_what_is_no_card_has_no_speed(ifname: str) -> None:
    assert read_card_speed(ifname) is None
