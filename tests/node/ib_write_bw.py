"""Stands in for perftest's ib_write_bw with --report_gbits and -D: its options, its meeting over TCP, what it prints.

As write_bw.c and the formats of perftest_parameters.h (26.07) have it. $STAND_IN_GBIT is the average that it reports by
device, `mlx5_0=92.57,mlx5_1=97.28`; of another device it fails as for one that is not there.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import TextIO

LINE = "-" * 87


def say(words: str, file: TextIO = sys.stdout) -> None:
    file.write(f"{words}\n")
    file.flush()


ASKED = argparse.ArgumentParser()
for one in ("-d", "-i", "-x", "-p", "-s", "-q", "-D"):
    ASKED.add_argument(one)
ASKED.add_argument("-F", action="store_true")
ASKED.add_argument("--report_gbits", action="store_true")
ASKED.add_argument("server", nargs="?")
asked = ASKED.parse_args()
rates = dict(pair.split("=") for pair in os.environ["STAND_IN_GBIT"].split(","))
with Path(os.environ["STAND_IN_LOG"]).open("a", encoding="utf-8") as log:
    log.write(" ".join(sys.argv[1:]) + "\n")
if asked.d not in rates:
    say(f"IB device {asked.d} not found", file=sys.stderr)
    say(" Unable to find the Infiniband/RoCE device", file=sys.stderr)
    sys.exit(1)
say(" WARNING: BW peak won't be measured in this run.")
if asked.server:
    try:
        peer = socket.create_connection((asked.server, int(asked.p)), timeout=10)
    except OSError:
        say(f"Couldn't connect to {asked.server}:{asked.p}", file=sys.stderr)
        say(" Unable to init the socket connection", file=sys.stderr)
        sys.exit(1)
else:
    say("\n************************************")
    say("* Waiting for client to connect... *")
    say("************************************")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", int(asked.p)))
    listener.listen(1)
    peer = listener.accept()[0]
    listener.close()
say(LINE)
say("                    RDMA_Write BW Test")
say(f" Dual-port       : OFF\t\tDevice         : {asked.d}")
say(f" Number of qps   : {asked.q}\t\tTransport type : IB")
say(" Connection type : RC\t\tUsing SRQ      : OFF")
say(" PCIe relax order: ON\t\tLock-free      : OFF")
say(" ibv_wr* API     : ON\t\tUsing Enhanced Reorder      : OFF")
if asked.server:
    say(" TX depth        : 128")
say(" CQ Moderation   : 1")
say(" CQE Poll Batch  : 16")
say(" Mtu             : 4096[B]")
say(" Link type       : Ethernet")
if asked.x:
    say(f" GID index       : {asked.x}")
say(" Max inline data : 0[B]")
say(" rdma_cm QPs\t : OFF")
say(" Data ex. method : Ethernet")
say(LINE)
for number in range(int(asked.q)):
    say(f" local address: LID 0000 QPN {0x4C + number:#06x} PSN 0x1f85cd RKey 0x180f00 VAddr 0x007f6d5c2a0000")
    say(" GID: 00:00:00:00:00:00:00:00:00:00:255:255:192:168:100:10")
say(LINE)
say(" #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]")
peer.sendall(b"x")
peer.recv(1)
size, gbit = int(asked.s), float(rates[asked.d])
count = int(gbit * 1e9 * int(asked.D) / 8 / size)
rate = gbit * 1e9 / 8 / size / 1e6
if gbit < 0.1:
    say(f" {size:<7}    {count}           {0:<7.6f}            {gbit:<7.6f}            {rate:<7.6f}")
else:
    say(f" {size:<7}    {count:<10}       {0:<7.2f}            {gbit:<7.2f}\t\t     {rate:<7.6f}")
say(LINE)
