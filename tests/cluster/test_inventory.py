"""What Ansible says of an inventory: `inventory.json` is what ansible-inventory 2.19.14 printed of `inventory.ini`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.cluster.allocation import parse_inventory
from multinode.cluster.cluster import Node
from multinode.cluster.hostfile import parse_hostfile, render_hostfile
from multinode.cluster.inventory import is_inventory
from multinode.errors import UsageError

INI = (Path(__file__).parent / "inventory.ini").read_text()
LISTING = (Path(__file__).parent / "inventory.json").read_text()
KEY = "~/.ssh/gpu"
GPU = (
    *(Node(name=f"node{number}.lan", user="bob", key=KEY) for number in ("01", "02")),
    Node(name="192.0.2.7", user="alice", port=2222, key=KEY),
)
CPU = tuple(Node(name=name, port=2200) for name in ("ca", "cb"))
LONELY = (Node(name="lonely"),)
# Ansible's order of a group: its own hosts, then those of the groups within it.
GROUPS = {"gpu": GPU, "cpu": CPU, "every": (*GPU, *CPU), "all": (*LONELY, *GPU, *CPU)}


def listing(hosts: object, variables: object) -> str:
    return json.dumps({"_meta": {"hostvars": variables}, "g": {"hosts": hosts}})


def complaint(text: str, group: str | None = "g") -> UsageError:
    with pytest.raises(UsageError) as caught:
        parse_inventory(text, group, "inv")
    return caught.value


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_its_hosts_with_what_leads_to_them(group: str) -> None:
    cluster, _ = parse_inventory(LISTING, group, "inv")
    assert cluster.source == "inv"
    assert cluster.nodes == GROUPS[group]
    # What a run keeps is a hostfile.
    assert parse_hostfile(render_hostfile(cluster)).nodes == cluster.nodes


def test_the_names_of_other_variables_are_told_and_not_their_values() -> None:
    _, ignored = parse_inventory(LISTING, "gpu")
    assert set(ignored) == {"ansible_password", "ansible_python_interpreter", "rack"}


@pytest.mark.parametrize(
    ("host", "variables", "node"),
    [
        ("n", {"ansible_ssh_host": "h", "ansible_ssh_user": "u"}, Node(name="h", user="u")),
        ("n", {"ansible_private_key_file": "a b"}, Node(name="n", key="a b")),
        ("n", {"ansible_port": "23"}, Node(name="n", port=23)),
        ("2001:db8::1", {}, Node(name="2001:db8::1")),
    ],
)
def test_a_host_may_be_described_in_these_ways(host: str, variables: dict[str, str], node: Node) -> None:
    assert parse_inventory(listing([host], {host: variables}), "g")[0].nodes == (node,)


@pytest.mark.parametrize(
    ("hosts", "variables", "message"),
    [
        (["n"], {"n": {"ansible_port": "x"}}, "inv:n: port='x': expected a port, 1 to 65535"),
        (["n"], {"n": {"ansible_host": "{{x}}"}}, "inv:n: '{{x}}' is not a node's name"),
        (["n"], {"n": {"ansible_user": {"__ansible_vault": "x"}}}, "inv:n: ansible_user is not text"),
        (["a", "b"], {host: {"ansible_host": "h"} for host in "ab"}, "inv:b: duplicate node 'h' (a)"),
        (["-oProxyCommand=x"], {}, "inv:-oProxyCommand=x: '-oProxyCommand=x' is not a node's name"),
        (["a,b"], {}, "inv:a,b: 'a,b' is not a node's name"),
        (["a\nb"], {}, "inv:a b: 'a\\nb' is not a node's name"),
        ("n", {}, "inv is not output of ansible-inventory --list: Expected `array`"),
        ([], {}, "inv is an Ansible inventory, but it has no group 'g' with hosts"),
    ],
)
def test_what_is_wrong_is_told_with_its_host(hosts: object, variables: object, message: str) -> None:
    assert str(complaint(listing(hosts, variables))).startswith(message)


def test_an_inventory_without_a_choice_of_a_group_names_those_that_there_are() -> None:
    error = complaint(LISTING, None)
    assert str(error) == "inv is an Ansible inventory, but no group was named"
    assert error.hint == "use --hosts inv:GROUP; groups with hosts: all, cpu, every, gpu, ungrouped"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (INI, True),
        (LISTING, True),
        ("---\ngpu:\n  hosts:\n", True),
        ("", False),
        ("node1\nnode2 slots=2\n", False),
        ("[1-3]\n", False),
        ("2001:db8::\n", False),
        ("fe80::1 slots=1\n", False),
    ],
)
def test_an_inventory_is_told_from_a_hostfile(text: str, expected: bool) -> None:  # noqa: FBT001 - a column of a table
    assert is_inventory(text) is expected


_NAMES = st.sampled_from(["g", "h", "all", "n", "a\nb", "x y", "-o", "{{x}}"]) | st.text(max_size=4)
_VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.lists(st.text(max_size=2), max_size=2)
_PARTS = {"hosts": st.lists(_NAMES, max_size=3), "children": st.lists(_NAMES, max_size=3), "vars": _VALUES}
_VARIABLES = st.dictionaries(st.sampled_from(["ansible_host", "ansible_port", "ansible_user", "x"]), _VALUES)


@given(
    st.dictionaries(_NAMES, st.fixed_dictionaries({}, optional=_PARTS), max_size=4),
    st.dictionaries(_NAMES, _VARIABLES, max_size=4),
    st.sampled_from(["g", "all", "h", None]),
)
def test_whatever_ansible_says_it_is_a_cluster_or_one_error(groups: object, variables: object, group: str) -> None:
    text = json.dumps({"_meta": {"hostvars": variables}, **dict(groups)})  # type: ignore[call-overload]
    try:
        cluster, _ = parse_inventory(text, group, "inv")
    except UsageError as error:
        assert str(error).startswith(("inv:", "inv is an Ansible inventory"))  # noqa: PT017 - one of the right answers
    else:
        assert parse_hostfile(render_hostfile(cluster)).nodes == cluster.nodes
