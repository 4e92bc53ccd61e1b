from __future__ import annotations

import pytest

from multinode.profile.nics import nic_rates
from multinode.records.samples import NicSample


def nic(at_s: int, rx: int, tx: int, ifname: str = "a") -> NicSample:
    return NicSample(time_s=at_s, mono_ns=at_s * 10**9, ifname=ifname, rx_bytes=rx, tx_bytes=tx)


def test_each_nic_has_its_own_rates() -> None:
    rates = nic_rates([nic(1, 0, 0), nic(1, 7, 7, "b"), nic(3, 250_000_000, 500_000_000), nic(3, 7, 7, "b")])
    (rate,) = rates["a"]
    assert rate.in_gbit_per_s == pytest.approx(1.0)
    assert rate.out_gbit_per_s == pytest.approx(2.0)
    assert rate.sample.time_s == 3
    assert rates["b"][0].in_gbit_per_s == 0


def test_counters_that_began_anew_and_a_clock_that_stands_still_give_no_rate() -> None:
    rates = nic_rates([nic(1, 100, 100), nic(2, 5, 200), nic(2, 6, 201)])["a"]
    assert [(rate.in_gbit_per_s, rate.out_gbit_per_s) for rate in rates] == [(None, None)]
