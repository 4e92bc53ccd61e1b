"""Links as people write them, in tables and in files of figures."""

from __future__ import annotations

import pytest

from multinode.predict.published import PublishedLink, parse_link
from multinode.predict.published_benchmarks import Network


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("10GbE", PublishedLink(gbit_per_s=10)),
        ("10 Gigabit Ethernet", PublishedLink(gbit_per_s=10)),
        ("25 Gbit/s", PublishedLink(gbit_per_s=25)),
        ("1,600 Gbps", PublishedLink(gbit_per_s=1600)),
        ("1000 Mbps", PublishedLink(gbit_per_s=1)),
        ("2 x 25 GbE", PublishedLink(gbit_per_s=50, nics=2)),
        ("100g", PublishedLink(gbit_per_s=100)),
        ("8x400G InfiniBand", PublishedLink(gbit_per_s=3200, nics=8, rdma=True)),
        ("100GbE RoCEv2", PublishedLink(gbit_per_s=100, rdma=True)),
        ("3.2 Tbps EFA", PublishedLink(gbit_per_s=3200, rdma=True)),
        ("200Gb/s HDR", PublishedLink(gbit_per_s=200, rdma=True)),
        ("4x HDR", PublishedLink(gbit_per_s=800, nics=4, rdma=True)),
        ("8x400 Gbit/s over RDMA", PublishedLink(gbit_per_s=3200, nics=8, rdma=True)),
        ("TCP over 200G InfiniBand", PublishedLink(gbit_per_s=200, rdma=False)),
        ("\u4e07\u5146\u4ee5\u592a\u7f51", PublishedLink(gbit_per_s=10)),
        ("IB", PublishedLink(rdma=True)),
        ("Ethernet", PublishedLink()),
    ],
)
def test_a_link_is_its_rate_its_nics_and_whether_it_is_rdma(text: str, link: PublishedLink) -> None:
    assert parse_link(text) == link


@pytest.mark.parametrize("text", ["25 GB/s", "1G/10G", "10", "0G", "12%", "PCIe 4.0 x16"])
def test_what_may_be_bytes_or_two_rates_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it in bits per second, as 10GbE"):
        parse_link(text)


def test_in_a_file_of_figures_infiniband_is_rdma() -> None:
    assert Network(gbit_per_s="8x400G InfiniBand").stated == PublishedLink(gbit_per_s=3200, nics=8, rdma=True)
    assert Network(gbit_per_s="100").stated == PublishedLink(gbit_per_s=100, nics=None, rdma=False)


def test_in_a_file_of_figures_a_link_needs_a_rate() -> None:
    with pytest.raises(ValueError, match="'InfiniBand' is not a link rate; write it as 10GbE, 100G or 8x400G"):
        Network(gbit_per_s="InfiniBand")
