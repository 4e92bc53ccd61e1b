from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.cluster.cluster import Node
from multinode.cluster.hostfile import parse_hostfile, render_hostfile
from multinode.cluster.inventory import is_inventory, parse_inventory
from multinode.errors import HostfileError, UsageError

INI = """\
; of one cluster
lonely
[gpu]
node[01:03].lan ansible_user=bob
box ansible_host=192.0.2.7 ansible_port=2222 rack='row 4'   # beside the door
[gpu:vars]
ansible_user = alice
ansible_ssh_private_key_file=~/.ssh/gpu
[cpu]
c[a:b]:2200
[every:children]
gpu
cpu
[every:vars]
ansible_user=carol
ansible_python_interpreter=/usr/bin/python3
[all:vars]
ansible_port=22
ansible_password=hunter2
"""
YAML = """\
# of one cluster
all:
  vars: {ansible_port: 22, ansible_password: hunter2}
  hosts:
    lonely:
  children:
    every:
      vars:
        ansible_user: carol
        ansible_python_interpreter: /usr/bin/python3
      children:
        gpu:
          hosts:
            node[01:03].lan: {ansible_user: bob}
            box:
              ansible_host: 192.0.2.7
              ansible_port: 2222
              rack: [row, 4]
          vars:
            ansible_user: alice
            ansible_ssh_private_key_file: ~/.ssh/gpu
        cpu:
          hosts:
            c[a:b]: {ansible_port: 2200}
"""
KEY = "~/.ssh/gpu"
GPU = tuple(Node(name=f"node{number}.lan", user="bob", port=22, key=KEY) for number in ("01", "02", "03"))
GPU = (*GPU, Node(name="192.0.2.7", user="alice", port=2222, key=KEY))
CPU = tuple(Node(name=name, user="carol", port=2200) for name in ("ca", "cb"))
LONELY = (Node(name="lonely", port=22),)
# Ansible's order of a group: its own hosts, then those of the groups within it.
GROUPS = {"gpu": GPU, "cpu": CPU, "every": (*GPU, *CPU), "all": (*LONELY, *GPU, *CPU)}


def complaint(text: str, group: str | None = "g") -> UsageError:
    with pytest.raises(UsageError) as caught:
        parse_inventory(text, group, "inv")
    return caught.value


@pytest.mark.parametrize("text", [INI, YAML], ids=["ini", "yaml"])
@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_its_hosts_with_what_leads_to_them(text: str, group: str) -> None:
    cluster, _ = parse_inventory(text, group, "inv")
    assert cluster.source == "inv"
    assert cluster.nodes == GROUPS[group]
    # What a run keeps is a hostfile.
    assert parse_hostfile(render_hostfile(cluster)).nodes == cluster.nodes


@pytest.mark.parametrize("text", [INI, YAML], ids=["ini", "yaml"])
def test_the_names_of_other_variables_are_told_and_not_their_values(text: str) -> None:
    _, ignored = parse_inventory(text, "gpu")
    assert set(ignored) == {"ansible_password", "ansible_python_interpreter", "rack"}


@pytest.mark.parametrize(
    ("line", "node"),
    [
        ("n ansible_ssh_host=h ansible_ssh_user=u", Node(name="h", user="u")),
        ("n ansible_private_key_file='a b'", Node(name="n", key="a b")),
        ("2001:db8::1", Node(name="2001:db8::1")),
        ("[2001:db8::1]:2222", Node(name="2001:db8::1", port=2222)),
        ("n:2222 ansible_port=23", Node(name="n", port=23)),
    ],
)
def test_a_host_may_be_written_in_these_ways(line: str, node: Node) -> None:
    assert parse_inventory(f"[g]\n{line}\n", "g")[0].nodes == (node,)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("n[1:3]", ["n1", "n2", "n3"]),
        ("n[08:10].lan", ["n08.lan", "n09.lan", "n10.lan"]),
        ("n[0:6:3]", ["n0", "n3", "n6"]),
        ("n[x:z]", ["nx", "ny", "nz"]),
        ("r[1:2]-[1:2]", ["r1-1", "r1-2", "r2-1", "r2-2"]),
    ],
)
def test_ranges_are_those_of_ansible(pattern: str, names: list[str]) -> None:
    assert [node.name for node in parse_inventory(f"[g]\n{pattern}\n", "g")[0].nodes] == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[g]\nn[1-3]\n", "inv:2: 'n[1-3]': '1-3' is not a range, as in node[01:16] or node[a:f]"),
        ("[g]\nn[3:1]\n", "inv:2: 'n[3:1]': the range '3:1' ends before it begins"),
        ("[g]\nn[1:3:0]\n", "inv:2: 'n[1:3:0]': the range '1:3:0' ends before it begins"),
        ("[g]\nn[1:9999]\n", "inv:2: 'n[1:9999]' stands for more than 4096 names"),
        ("[g]\nn user\n", "inv:2: 'user' is not NAME=VALUE of a host"),
        ("[g]\nn 'ansible_user=a\n", "inv:2: a quote is not closed, or a backslash stands at its end"),
        ("[g]\nn ansible_port=x\n", "inv:2: port='x': expected a port, 1 to 65535"),
        ("[g]\nn ansible_host={{x}}\n", "inv:2: '{{x}}' is not a node's name"),
        ("[g]\na ansible_host=h\nb ansible_host=h\n", "inv:3: duplicate node 'h' (line 2)"),
        ("[g]\nn\n[g:vars]\nansible_user\n", "inv:4: 'ansible_user' is not NAME=VALUE"),
        ("[g]\nn\n[h:vars]\nansible_user=a\n", "inv:4: there is no group 'h'"),
        ("[g:children]\nh\n", "inv:2: there is no group 'h'"),
        ("[g:hosts2]\n", "inv:1: [g:hosts2]: expected [g], [g:vars] or [g:children]"),
        ("[g:children]\nh\n[h:children]\ng\n", "inv:2: the group 'g' is within itself, or within one that is"),
        ("g:\n  hosts: n\n", "inv:2: expected a mapping of hosts"),
        ("g:\n  hosts:\n    n: [1]\n", "inv:3: expected a mapping of variables"),
        ("g:\n  hosts:\n    [a, b]: {}\n", "inv:"),
        ("g:\n  hosts: {\n", "inv:"),
        ("g:\n  hosts:\n    n: !vault |\n      x\n", "inv:3: could not determine a constructor for the tag '!vault'"),
        ("[g]\n[h]\nn\n", "inv is an Ansible inventory, and no group 'g' of it has hosts"),
        ("[h]\nn\n", "inv is an Ansible inventory, and no group 'g' of it has hosts"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, message: str) -> None:
    assert str(complaint(text)).startswith(message)


def test_an_inventory_without_a_choice_of_a_group_names_those_that_there_are() -> None:
    error = complaint(INI, None)
    assert str(error) == "inv is an Ansible inventory, and no group of it was named"
    assert error.hint == "--hosts inv:GROUP; its groups with hosts: all, ungrouped, gpu, cpu, every"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (INI, True),
        (YAML, True),
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


_INI_PARTS = [
    "[g]",
    "[g:vars]",
    "[g:children]",
    "[h]",
    "\n",
    "n",
    "[1:3]",
    "[a:",
    ":22",
    "=",
    " ",
    "'",
    "#",
    "ansible_host=",
]
_YAML_PARTS = ["g:", "\n", "  ", "hosts:", "vars:", "children:", "{", "}", "[", "*a", "&a ", "<<: ", "n: ", "!x ", "- "]


@given(
    st.text()
    | st.lists(st.sampled_from(_INI_PARTS) | st.text(max_size=3), max_size=16).map("".join)
    | st.lists(st.sampled_from(_YAML_PARTS) | st.text(max_size=2), max_size=16).map("".join),
    st.sampled_from(["g", "all", "h", None]),
)
def test_whatever_is_in_an_inventory_it_is_a_cluster_or_one_error(text: str, group: str | None) -> None:
    is_inventory(text)
    try:
        cluster, _ = parse_inventory(text, group, "inv")
    except HostfileError as error:
        assert str(error).split(":")[0] == "inv"  # noqa: PT017 - an error is one of the right answers
        assert str(error).split(":")[1].isdigit()  # noqa: PT017 - as above
    except UsageError as error:
        assert str(error).startswith("inv is an Ansible inventory")  # noqa: PT017 - as above
    else:
        assert parse_hostfile(render_hostfile(cluster)).nodes == cluster.nodes


_hosts = st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), min_size=1, max_size=6, unique=True)


@given(_hosts, st.integers(1, 65535), st.from_regex(r"[a-z_][a-z0-9_-]{0,8}", fullmatch=True))
def test_both_forms_of_the_same_inventory_are_the_same_cluster(hosts: list[str], port: int, user: str) -> None:
    ini = "[g]\n" + "".join(f"{host}\n" for host in hosts) + f"[g:vars]\nansible_port={port}\nansible_user={user}\n"
    yaml = "g:\n  hosts:\n" + "".join(f"    '{host}':\n" for host in hosts)
    yaml += f"  vars: {{ansible_port: {port}, ansible_user: '{user}'}}\n"
    expected = tuple(Node(name=host, port=port, user=user) for host in hosts)
    assert [parse_inventory(text, "g")[0].nodes for text in (ini, yaml)] == [expected, expected]
