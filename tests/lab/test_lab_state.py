from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from multinode.errors import UsageError
from multinode.lab.state import LabSpec, assign_cores, controller_address, lock_lab, node_addresses


def test_addresses_follow_from_the_node_rank() -> None:
    spec = LabSpec(node_count=200, python="/usr/bin/python3")
    first, last = node_addresses(spec, 0), node_addresses(spec, 199)
    assert (first.management, first.data) == ("10.213.0.1", "10.213.1.1")
    assert (last.management, last.data) == ("10.213.0.200", "10.213.1.200")
    assert controller_address(spec) == "10.213.0.254"


def test_a_training_network_may_have_ipv6_addresses_alone() -> None:
    last = node_addresses(LabSpec(node_count=200, python="/usr/bin/python3", ipv6=True), 199)
    assert (last.management, last.data) == ("10.213.0.200", "fd6d:6e00::c8")


@pytest.mark.parametrize("network", ["10.213.0.0/24", "10.213.1.0/23", "8.8.8.0/23", "fd00::/23", "lab"])
def test_a_network_that_will_not_do_is_refused(network: str) -> None:
    with pytest.raises(UsageError, match="network"):
        node_addresses(LabSpec(python="/usr/bin/python3", network=network), 0)


@pytest.mark.parametrize("count", [0, 201])
def test_a_lab_of_too_few_or_too_many_nodes_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match=f"a lab of {count} nodes"):
        node_addresses(LabSpec(node_count=count, python="/usr/bin/python3"), 0)


def test_pinned_nodes_have_no_core_in_common() -> None:
    spec = LabSpec(node_count=3, cores_per_node=2, python="/usr/bin/python3")
    available = (0, 1, 4, 5, 6, 7, 9)
    assert [assign_cores(spec, available, rank) for rank in range(3)] == [(0, 1), (4, 5), (6, 7)]


def test_more_cores_than_there_are_is_an_error() -> None:
    spec = LabSpec(node_count=2, cores_per_node=2, python="/usr/bin/python3")
    with pytest.raises(UsageError, match="2 nodes of 2 cores do not fit on 3 cores"):
        assign_cores(spec, (0, 1, 2), 0)


def test_nodes_that_are_not_pinned_share_all_cores() -> None:
    assert assign_cores(LabSpec(python="/usr/bin/python3"), (0, 1), 1) is None


def test_a_second_lab_command_waits_for_the_first_within_its_deadline() -> None:
    begun = threading.Event()

    def lock_again() -> bool:
        begun.set()
        with lock_lab(deadline_s=60):
            return True

    with ThreadPoolExecutor(max_workers=1) as pool:
        with lock_lab(deadline_s=60):
            with pytest.raises(UsageError, match="another `multinode lab` command is running"), lock_lab(deadline_s=0):
                pass
            second = pool.submit(lock_again)
            assert begun.wait(60)
            assert not second.done()
        assert second.result(timeout=60)
