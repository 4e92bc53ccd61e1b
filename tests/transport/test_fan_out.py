from __future__ import annotations

import threading

import pytest

from multinode.cluster.cluster import Node
from multinode.errors import AuthError, ConnectError, ContactLost, MultinodeError, NodeFailed
from multinode.transport.base import DEFAULT_FAN_OUT, gather

NODES = [Node(name=f"node{index}") for index in range(4)]


def test_every_node_answers_with_a_value_or_an_error_in_the_order_of_the_nodes() -> None:
    turns = [threading.Event() for _ in NODES]
    turns[-1].set()

    def ask(node: Node) -> str:
        index = NODES.index(node)
        turns[index].wait(10)
        turns[index - 1].set()  # the last one answers first
        if index == 1:
            raise AuthError("refused")
        return node.name.upper()

    outcomes = gather(NODES, ask, deadline_s=10)
    assert list(outcomes.found.items()) == [("node0", "NODE0"), ("node2", "NODE2"), ("node3", "NODE3")]
    assert {name: str(error) for name, error in outcomes.failed.items()} == {"node1": "node1: refused"}


def test_a_silent_node_is_told_as_lost_and_hides_no_other() -> None:
    release = threading.Event()

    def ask(node: Node) -> str:
        if node is NODES[0]:
            release.wait(30)
        return node.name

    outcomes = gather(NODES, ask, deadline_s=1.0)
    release.set()
    assert list(outcomes.found) == ["node1", "node2", "node3"]
    (error,) = outcomes.failed.values()
    assert isinstance(error, ContactLost)
    assert error.node == "node0"
    assert error.hint == "see whether it is up: ssh node0 true"


def test_more_nodes_than_threads_are_all_asked_and_never_too_many_at_once() -> None:
    nodes = [Node(name=f"n{index}") for index in range(3 * DEFAULT_FAN_OUT + 1)]
    lock = threading.Lock()
    release = threading.Event()
    running, most = 0, 0

    def ask(node: Node) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        release.wait(10)
        with lock:
            running -= 1
        return node.name

    timer = threading.Timer(0.5, release.set)
    timer.start()
    assert list(gather(nodes, ask, deadline_s=10).found) == [node.name for node in nodes]
    timer.join()
    assert most == DEFAULT_FAN_OUT


def test_a_value_that_is_false_or_none_is_a_value() -> None:
    outcomes = gather(NODES[:2], lambda node: None if node is NODES[0] else 0, deadline_s=10)
    assert outcomes.require() == {"node0": None, "node1": 0}


def test_an_error_that_is_an_answer_is_a_value() -> None:
    outcomes = gather(NODES[:1], lambda _: ConnectError("seen"), deadline_s=10)
    assert [str(error) for error in outcomes.require().values()] == ["seen"]


def test_require_raises_the_first_error_with_the_others_in_its_detail() -> None:
    def ask(node: Node) -> None:
        raise {"node0": ConnectError("timed out"), "node1": NodeFailed("no python3")}.get(node.name, AuthError("no"))

    with pytest.raises(ConnectError) as caught:
        gather(NODES, ask, deadline_s=10).require()
    assert caught.value.node == "node0"
    assert caught.value.detail.splitlines() == ["also node1: no python3", "also node2: no", "also node3: no"]


def test_an_error_that_names_its_node_keeps_it() -> None:
    def ask(_: Node) -> None:
        raise MultinodeError("gateway is down", node="gateway")

    (error,) = gather(NODES[:1], ask, deadline_s=10).failed.values()
    assert error.node == "gateway"


def test_a_defect_is_raised_and_not_taken_for_an_answer() -> None:
    def ask(node: Node) -> None:
        raise ZeroDivisionError(node.name)

    with pytest.raises(ZeroDivisionError):
        gather(NODES, ask, deadline_s=10)


def test_no_nodes_give_no_outcomes() -> None:
    assert gather([], lambda node: node, deadline_s=1).require() == {}
