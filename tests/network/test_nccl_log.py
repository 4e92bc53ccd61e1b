"""NCCL's own log, in the form that NCCL_DEBUG=INFO gives it since 2.18."""

from __future__ import annotations

import pytest

from multinode.network.nic_path import parse_nccl_log

SOCKETS = """\
node0:812:812 [0] NCCL INFO Bootstrap: Using ens1f0:192.0.2.11<0>
node0:812:812 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
node0:812:830 [0] NCCL INFO NET/IB : No device found.
node0:812:830 [0] NCCL INFO NET/Socket : Using [0]ens1f0:192.0.2.11<0> [1]eth0:198.51.100.11<0>
node0:812:830 [0] NCCL INFO Using network Socket
node0:812:830 [0] NCCL INFO Channel 00/02 :    0   1   2   3
node0:812:830 [0] NCCL INFO Channel 01/02 :    0   1   2   3
node0:812:830 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] 1/-1/-1->0->-1
node0:812:830 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/Socket/0
node0:812:830 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node0:812:830 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
node0:812:830 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
node0:812:830 [0] NCCL INFO 2 coll channels, 0 collnet channels, 0 nvls channels, 2 p2p channels
"""


def test_sockets_are_told_with_interfaces_transports_channels_and_ring() -> None:
    path = parse_nccl_log(SOCKETS.splitlines())
    assert path is not None
    assert (path.version, path.network, path.bootstrap_ifname) == ("2.27.3+cuda12.9", "Socket", "ens1f0")
    assert path.nics == ("ens1f0", "eth0")
    # A connection over the network is written down at both ends, and counts once.
    assert path.transports == {"P2P/CUMEM": 2, "NET/Socket/0": 1}
    assert (path.channels, path.ring) == (2, (0, 1, 2, 3))
    assert "network Socket over ens1f0, eth0, 2 channels" in path.sentence


# The form of NCCL's lines: 20 ranks of 64 up to 2.21, then 128 characters of the line from 2.27 on.
INIT = "n:1:1 [0] NCCL INFO ncclCommInitRank comm 0x55d5 rank 0 nranks 64 cudaDev 0 nvmlDev 0 busId 1000 - Init START"
FIRST_20 = "n:1:1 [0] NCCL INFO Channel 00/02 :" + "".join(f" {rank:3d}" for rank in range(20))
CUT = ("n:1:1 [0] NCCL INFO Channel 00/02 :" + "".join(f" {rank}" for rank in range(64)))[:128]
LAST = "n:1:1 [0] NCCL INFO Channel 00/0 : 63[7] -> 0[0] [send] via NET/Socket/0"


@pytest.mark.parametrize("lines", [[INIT, FIRST_20], [FIRST_20, INIT], [INIT, CUT], [FIRST_20, LAST], [LAST, CUT]])
def test_a_part_of_a_ring_is_not_told_as_one(lines: list[str]) -> None:
    path = parse_nccl_log(["n:1:1 [0] NCCL INFO Using network Socket", *lines])
    assert path is not None
    assert path.ring == ()


def test_rdma_is_told_by_its_nics() -> None:
    path = parse_nccl_log(
        [
            "n:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/IB [RO]; OOB ens1f0:192.0.2.1<0>",
            "n:1:1 [0] NCCL INFO Using network IB",
            "n:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA",
        ]
    )
    assert path is not None
    assert (path.network, path.nics) == ("IB", ("mlx5_0:1/RoCE", "mlx5_1:1/IB"))
    assert path.transports == {"NET/IB/0/GDRDMA": 1}


CONNECTED = "n:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/{}"


def test_the_nics_that_connections_go_over_are_told_apart_from_those_that_are_there() -> None:
    found = parse_nccl_log(
        [
            "n:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [2]mlx5_2:1/RoCE [RO]",
            CONNECTED.format("IB/2/GDRDMA"),
            CONNECTED.format("IB/0"),
        ]
    )
    assert found is not None
    assert found.nics == ("mlx5_0:1/RoCE", "mlx5_1:1/RoCE", "mlx5_2:1/RoCE")
    assert found.used == ("mlx5_0:1/RoCE", "mlx5_2:1/RoCE")
    sockets = parse_nccl_log(SOCKETS.splitlines())
    assert sockets is not None
    assert sockets.used == ("ens1f0",)


@pytest.mark.parametrize(
    ("listed", "device", "used"),
    [
        # 2.20 to 2.22.
        (
            "NET/IB : Using [0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE} [1]={[0] mlx5_2:1/RoCE} [RO]",
            0,
            ("mlx5_0:1/RoCE", "mlx5_1:1/RoCE"),
        ),
        # From 2.23 on.
        (
            "NET/IB : Made virtual device [4] name=mlx5_0+mlx5_1 speed=400000 ndevs=2",
            4,
            ("mlx5_0:1/joined", "mlx5_1:1/joined"),
        ),
    ],
)
def test_ports_that_nccl_joins_are_both_used(listed: str, device: int, used: tuple[str, ...]) -> None:
    found = parse_nccl_log([f"n:1:1 [0] NCCL INFO {listed}", CONNECTED.format(f"IB/{device}/GDRDMA")])
    assert found is not None
    assert found.used == used


@pytest.mark.parametrize(
    ("line", "network", "over_rdma"),
    [
        ("Using network AWS Libfabric", "AWS Libfabric", True),
        ("Using network IBext_v8", "IBext_v8", True),
        ("Using network IB", "IB", True),
        ("Using network FastSocket", "FastSocket", False),
        ("Using network Socket", "Socket", False),
        ("Assigned NET plugin Socket to comm", "Socket", False),
    ],
)
def test_a_network_is_named_whole_and_known_to_be_tcp_or_not(line: str, network: str, *, over_rdma: bool) -> None:
    found = parse_nccl_log([f"n:1:1 [0] NCCL INFO {line}", CONNECTED.format(f"{network}/0/GDRDMA")])
    assert found is not None
    assert (found.network, found.over_rdma) == (network, over_rdma)
    assert found.transports == {f"NET/{network}/0/GDRDMA": 1}


def test_older_lines_end_with_the_communicator() -> None:
    line = "n:1:1 [0] NCCL INFO Channel 00/0 : 0[3000] -> 1[4000] via P2P/direct pointer comm 0x7f2c nRanks 02"
    found = parse_nccl_log([line])
    assert found is not None
    assert found.transports == {"P2P/direct pointer": 1}


def test_a_log_that_says_nothing_of_this_gives_nothing() -> None:
    assert parse_nccl_log([]) is None
    assert parse_nccl_log(["step 1 loss 2.0", "\x1b[2J via nothing"]) is None
