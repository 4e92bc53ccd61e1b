from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from multinode.lab.state import LabSpec, assign_cores, controller_address, lock_lab, node_addresses
from tests.golden import Golden, error_of


def test_addresses_follow_from_the_node_rank() -> None:
    spec = LabSpec(node_count=200, python="/usr/bin/python3")
    first, last = node_addresses(spec, 0), node_addresses(spec, 199)
    assert (first.management, first.data) == ("10.213.0.1", "10.213.1.1")
    assert (last.management, last.data) == ("10.213.0.200", "10.213.1.200")
    assert controller_address(spec) == "10.213.0.254"


def test_a_training_network_may_have_ipv6_addresses_alone() -> None:
    last = node_addresses(LabSpec(node_count=200, python="/usr/bin/python3", ipv6=True), 199)
    assert (last.management, last.data) == ("10.213.0.200", "fd6d:6e00::c8")


def test_networks_and_numbers_of_nodes_and_cores_that_will_not_do_are_refused(golden: Golden) -> None:
    pinned = LabSpec(node_count=2, cores_per_node=2, python="/usr/bin/python3")
    errors = {"cores 0, 1 and 2": error_of(assign_cores, pinned, (0, 1, 2), 0)}
    for network in ("10.213.0.0/24", "10.213.1.0/23", "8.8.8.0/23", "fd00::/23", "lab"):
        errors[network] = error_of(node_addresses, LabSpec(python="/usr/bin/python3", network=network), 0)
    for count in (0, 201):
        errors[f"{count} nodes"] = error_of(node_addresses, LabSpec(node_count=count, python="/usr/bin/python3"), 0)
    golden.check_errors("refused_labs", errors)


def test_pinned_nodes_have_no_core_in_common() -> None:
    spec = LabSpec(node_count=3, cores_per_node=2, python="/usr/bin/python3")
    available = (0, 1, 4, 5, 6, 7, 9)
    assert [assign_cores(spec, available, rank) for rank in range(3)] == [(0, 1), (4, 5), (6, 7)]


def test_nodes_that_are_not_pinned_share_all_cores() -> None:
    assert assign_cores(LabSpec(python="/usr/bin/python3"), (0, 1), 1) is None


def test_a_second_lab_command_waits_for_the_first_within_its_deadline(golden: Golden) -> None:
    begun = threading.Event()

    def lock_again() -> bool:
        begun.set()
        with lock_lab(deadline_s=60):
            return True

    with ThreadPoolExecutor(max_workers=1) as pool:
        with lock_lab(deadline_s=60):
            golden.check_errors("lab_is_locked", {"at once": error_of(lock_lab(deadline_s=0).__enter__)})
            second = pool.submit(lock_again)
            assert begun.wait(60)
            assert not second.done()
        assert second.result(timeout=60)
