from __future__ import annotations

import re
import string
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.hostfile import (
    expand_ranges,
    fold_numbers,
    fold_ranges,
    is_host_list,
    parse_host_list,
    parse_hostfile,
    render_hostfile,
)
from multinode.cluster.hostfile_line import KEYS
from multinode.cluster.hostfile_variables import with_variables
from multinode.errors import HostfileError
from tests.golden import Golden, raised

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((ROOT / "hostfiles").iterdir())
REFERENCE = (ROOT / "docs/reference/hostfile.md").read_text()


def nodes(text: str) -> tuple[Node, ...]:
    return parse_hostfile(text).nodes


def complaint(text: str) -> HostfileError:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(text, "hosts.txt")
    return caught.value


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a,b", [("a", None), ("b", None)]),
        ("a:2,b:2", [("a", 2), ("b", 2)]),
        ("a:4", [("a", 4)]),
        ("node[1-2]", [("node1", None), ("node2", None)]),
        ("node[1,3]:8,x", [("node1", 8), ("node3", 8), ("x", None)]),
        ("bob@a:2", [("a", 2)]),
        ("10.0.0.1,10.0.0.2", [("10.0.0.1", None), ("10.0.0.2", None)]),
        ("[2001:db8::1]:2,2001:db8::2", [("2001:db8::1", 2), ("2001:db8::2", None)]),
        # As in Open MPI, a name for each worker.
        ("a,a,b", [("a", 2), ("b", 1)]),
        # As Ansible and people write it.
        ("a, b ,", [("a", None), ("b", None)]),
    ],
)
def test_a_list_in_place_of_a_path_names_nodes(text: str, found: list[tuple[str, int | None]]) -> None:
    assert is_host_list(text)
    cluster, written = parse_host_list(text)
    assert [(node.name, node.slots) for node in cluster.nodes] == found
    assert cluster.source == text
    assert parse_hostfile(written).nodes == cluster.nodes


@pytest.mark.parametrize(
    "text", ["hosts.txt", "node1", "alice@node1", "dir/a,b", "inventory.ini:gpu", "fd00::1", "-", "./node[1-2]", ""]
)
def test_other_names_are_those_of_files(text: str) -> None:
    assert not is_host_list(text)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "a,b:22",
            "a,b:22: 22 in 'b:22' may be a port or a number of workers",
            "write b port=22, or b slots=22, in a file: --hosts FILE",
        ),
        (
            "a:2,a:2",
            "a:2,a:2: duplicate node 'a' (this list)",
            "name each node once, with the number of its workers: a:2",
        ),
        ("n[3-1]", "n[3-1]: 'n[3-1]': the range '3-1' ends before it starts", None),
    ],
)
def test_an_error_in_a_list_has_no_line(text: str, message: str, hint: str | None) -> None:
    with pytest.raises(HostfileError) as caught:
        parse_host_list(text)
    assert (str(caught.value), caught.value.hint) == (message, hint)


def test_every_key_lands_where_it_belongs() -> None:
    line = (
        "box gpus=6,7 addr=192.0.2.11 ifname=ens1f0 hca=mlx5_0 user=alice port=2222 key=~/.ssh/k jump=bob@gate:22 "
        "ssh_config=~/ssh.conf slurm_job=4711 python=~/env/bin/python workdir=/work price=0.35 price_purchase=15000 "
        "env.A=1 env.B_2='two words'"
    )
    expected = Node(
        name="box",
        slots=2,
        gpus=(6, 7),
        addr="192.0.2.11",
        ifname="ens1f0",
        hca="mlx5_0",
        user="alice",
        port=2222,
        key="~/.ssh/k",
        jump="bob@gate:22",
        ssh_config="~/ssh.conf",
        slurm_job=4711,
        python="~/env/bin/python",
        workdir="/work",
        price=0.35,
        price_purchase=15000.0,
        env={"A": "1", "B_2": "two words"},
    )
    assert nodes(line) == (expected,)
    each = Node(name="box", price_gpu=0.2, price_purchase_gpu=9000.5)
    assert nodes("box price_gpu=0.2 price_purchase_gpu=9000.5") == (each,)
    assert set(KEYS) | {"name", "env"} == set(Node.__struct_fields__)


def test_lines_of_deepspeed_and_open_mpi_are_valid_as_they_are() -> None:
    text = "# DeepSpeed\nworker-1 slots=4\nworker-2 slots=4\n\n# Open MPI\nworker-3 slots=4 max_slots=8\n"
    text += "worker-4 slots=4 max-slots=8\nworker-5\n"
    assert [node.slots for node in nodes(text)] == [4, 4, 4, 4, None]


def test_a_pbs_nodefile_has_a_line_for_each_slot() -> None:
    found = nodes("n2.lan\nn2.lan\nn1.lan\n\nn1.lan\nn2.lan\n")
    assert found == (Node(name="n2.lan", slots=3), Node(name="n1.lan", slots=2))
    # One line a node says nothing of slots.
    assert nodes("n2\nn1\n") == (Node(name="n2"), Node(name="n1"))
    assert str(complaint("n1\n" * 1025)) == "hosts.txt:1: slots='1025': expected a number of workers, 1 to 1024"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a slots = 4\nb slots= 4\nc slots =4\nd gpus = 0,1 ifname= eth0", [("a", 4), ("b", 4), ("c", 4), ("d", 2)]),
        ("a count=4 max-cpu=8\nb cpu = 4 slots_max=8\nc slots=4 max_slots = 8", [("a", 4), ("b", 4), ("c", 4)]),
        ("// comment\na slots=2 // more", [("a", 2)]),
        ("worker-0:2,worker-1:2", [("worker-0", 2), ("worker-1", 2)]),
        ("a,b slots=2", [("a", 2), ("b", 2)]),
        ("gpu[1,3]:2,x", [("gpu1", 2), ("gpu3", 2), ("x", None)]),
        ("[2001:db8::1]\n[2001:db8::2]:4", [("2001:db8::1", None), ("2001:db8::2", 4)]),
    ],
)
def test_the_forms_of_other_launchers_are_read(text: str, found: list[tuple[str, int | None]]) -> None:
    assert [(node.name, node.slots) for node in nodes(text)] == found


def test_a_user_and_an_address_are_read_in_the_forms_of_other_launchers() -> None:
    assert nodes("a username=alice\nbob@[2001:db8::1] addr=[2001:DB8::7]") == (
        Node(name="a", user="alice"),
        Node(name="2001:db8::1", user="bob", addr="2001:db8::7"),
    )


@pytest.mark.parametrize(
    ("line", "way"),
    [
        ("CORP\\alice@node1", "write node1 user='CORP\\alice'"),
        ("ssh -p 2222 -i ~/k alice@node1", "write alice@node1 port=2222 key=~/k"),
        ("alice@node1:2222", "write alice@node1 port=2222, or alice@node1 slots=2222"),
        ("- node1 slots=2", "write node1 slots=2"),
        ("node1 node2", "write one node per line: node1, then node2"),
        ("rank 0=node1 slot=0", "write one line per node, in rank order: node1 slots=N"),
        ("IP1 4", "write IP1 slots=4"),
        ("gpu[1-4]\t8  # of each", "write gpu[1-4] slots=8"),
        ("alice@node1 4 key='~/a b'", "write alice@node1 slots=4 'key=~/a b'"),
        ("node1 22", "write node1 port=22, or node1 slots=22"),
        ("172.20.20.20 worker0", "write worker0 addr=172.20.20.20"),
        ("172.20.20.20  worker0.lan worker0 w0 # rack 1", "write worker0.lan addr=172.20.20.20"),
        ("2001:db8::7 worker0 slots = 2", "write worker0 addr=2001:db8::7 slots=2"),
        ("worker0 172.20.20.20 8", "write worker0 addr=172.20.20.20 slots=8"),
        ("127.0.0.1 localhost", "remove it: this address always means the local machine"),
        ("::1 ip6-localhost ip6-loopback", "remove it: this address always means the local machine"),
        ("10.0.0.1 10.0.0.2", "write one node per line: 10.0.0.1, then 10.0.0.2"),
    ],
)
def test_a_form_that_is_refused_says_how_it_is_written(line: str, way: str) -> None:
    assert complaint(line).hint == way


def test_what_a_hint_says_to_write_is_read() -> None:
    assert nodes("node1 user='CORP\\alice'")[0].user == "CORP\\alice"
    assert nodes("alice@node1 port=2222 key=~/k")[0].port == 2222
    assert nodes("alice@node1 slots=4 'key=~/a b'") == (Node(name="node1", user="alice", slots=4, key="~/a b"),)
    assert nodes("worker0 addr=2001:db8::7 slots=2") == (Node(name="worker0", addr="2001:db8::7", slots=2),)


@pytest.mark.parametrize(
    "text",
    [
        "localhost\n127.0.0.1",
        "LOCALHOST\n::1",
        "fd00::1\nfd00:0::1",
        "Node1\nnode1",
        "a addr=10.0.0.1\nb addr=10.0.0.1",
        "a addr=fd00::1\nb addr=fd00:0:0::1",
    ],
)
def test_one_machine_by_two_names_is_an_error_but_where_each_has_gpus_of_its_own(text: str) -> None:
    assert str(complaint(text)).startswith("hosts.txt:2: ")
    one, two = text.split("\n")
    assert len(nodes(f"{one} gpus=0\n{two} gpus=1")) == 2
    assert "hosts.txt:2: " in str(complaint(f"{one} gpus=0,1\n{two} gpus=1"))


def test_an_ipv6_address_is_read_as_nodes_tell_theirs() -> None:
    assert [node.addr for node in nodes("n[1-2] addr=FD00:0:0::[1-2]")] == ["fd00::1", "fd00::2"]


def test_the_order_of_the_lines_is_the_node_rank() -> None:
    assert [node.name for node in nodes("b\na\n10.0.0.1\nc.lan\n")] == ["b", "a", "10.0.0.1", "c.lan"]


def test_a_range_is_one_node_each_with_its_own_address() -> None:
    found = nodes("node[01-03] addr=192.0.2.[11-13] slots=2")
    assert [(node.name, node.addr, node.slots) for node in found] == [
        ("node01", "192.0.2.11", 2),
        ("node02", "192.0.2.12", 2),
        ("node03", "192.0.2.13", 2),
    ]


def test_a_user_before_the_name_is_the_ssh_user() -> None:
    assert [(node.name, node.user) for node in nodes("alice@node[1-2]")] == [("node1", "alice"), ("node2", "alice")]


@pytest.mark.parametrize("address", ["fe80::1%eth0", "2001:db8::1", "192.0.2.1"])
def test_a_name_may_be_an_address_of_either_family(address: str) -> None:
    assert nodes(f"{address} addr={address}") == (Node(name=address, addr=address),)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("n env.X=a#b", "a#b"),
        ("n env.X=a #b", "a"),
        ("n env.X=a\t# it's", "a"),
        ("n env.X='a #b'", "a #b"),
        ('n env.X="say \\"hi\\" $HOME"', 'say "hi" $HOME'),
        ("n env.X=a\\ b", "a b"),
        ("n env.X=pre'fix 'ed", "prefix ed"),
        ("n env.X=", ""),
        ("n env.X=a=b", "a=b"),
        ("n env.X='\N{SNOWMAN}'", "\N{SNOWMAN}"),
    ],
)
def test_quotes_and_comments_are_those_of_a_shell(line: str, value: str) -> None:
    assert nodes(line)[0].env == {"X": value}


def test_line_ends_and_byte_order_marks_of_windows_do_no_harm() -> None:
    assert [node.name for node in nodes("\ufeffa slots=1\r\n\r\nb slots=1\r\n")] == ["a", "b"]


def test_gpus_say_how_many_slots_there_are() -> None:
    assert [node.slots for node in nodes("a gpus=6,7\nb gpus=3,1 slots=2\nc gpus=0")] == [2, 2, 1]
    assert [node.gpus for node in nodes("a gpus=0-3\nb gpus=7,0-1,5")] == [(0, 1, 2, 3), (7, 0, 1, 5)]


WRONG_LINES = (
    "node1 gpus=6,7 slots=3",
    "node1 gpus=6,6",
    "node1 gpus=6,,7",
    "node1 gpus=0-3,2",
    "node1 gpus=7-6",
    "node1 gpus=0-99999999",
    "node1 gpus=-1",
    "node1 slots=0",
    "node1 slots=two",
    "node1 slots=4 slots=4",
    "node1 port=0",
    "node1 port=65536",
    "node1 addr=node1",
    "node1 addr=0.0.0.0",
    "node1 addr=10.0.0.300",
    "node[1-2] addr=10.0.0.1",
    "node[1-2] addr=10.0.0.[1-3]",
    *(f"node1 ifname={names}" for names in ("=eth0", "^eth0", "eth0,", "eth0,eth0", "sixteen_letters_")),
    *(
        f"node1 hca={names}"
        for names in ("=mlx5_0", "^mlx5_0", "mlx5_0:", "mlx5_0:0", "mlx5_0,mlx5_0", "../../etc", "")
    ),
    "node1 hca=mlx5_0 env.NCCL_IB_HCA=mlx5",
    "node1 price=-1",
    "node1 price=1e3",
    "node1 price=nan",
    "node1 price=1 price_gpu=1",
    "node1 price_purchase_gpu=1 price_purchase=1",
    "node1 price_gpu=0.35/gpu",
    "node1 price_purchase=15,000",
    "node1 price=" + "9" * 400,
    "node1 key=-oProxyCommand",
    "node1 key=",
    "node1 python=' '",
    "node1 jump='a b'",
    "node1 jump=a,b",
    "node1 user='a b'",
    "@node1",
    "-x@node1",
    "alice@node1 user=bob",
    "node1 speed=fast",
    "node1 Slots=4",
    "node1 env.A = 4",
    "node1 slots =",
    "node1 lots=4",
    "node1 env.1A=x",
    "node1 env.=x",
    "node1 env.A=1 env.A=1",
    "slots=4",
    "-oProxyCommand slots=1",
    "'' slots=1",
    "node_1;reboot",
    "'fe80::1%a b'",
    "node1:22",
    "node1:2222",
    "node1:4 slots=4",
    "a:b:2",
    "CORP\\alice@node1",
    "300.1.1.1",
    "010.0.0.1",
    "0.0.0.0",
    "192.0.2",
    "Before",
    "n[1-2] addr=10.0.0.[1,1]",
    "rank 0=node1 slot=0",
    "^node1",
    "+n0",
    "- node1 slots=2",
    "node1 node2",
    "; a comment",
    "/* a comment */",
    "ssh -p 2222 alice@node1",
    "n\N{LATIN SMALL LETTER O WITH DIAERESIS}de",
    "node[1-",
    "node[3-1]",
    "node[1-4097]",
    "node[1,1]",
    "before slots=1",
    "node1 env.A='x",
    "node1 env.A=x\\",
    "node1 env.A='x'\"",
    "node1\x00",
    "node1 env.A=\x1b[31m",
    "node1\x0cnode2",
    "node1\N{NO-BREAK SPACE}slots=1",
    "node1 env.A=" + "x" * 70_000,
)


def test_a_wrong_line_is_named_with_what_was_found_and_what_was_expected(golden: Golden) -> None:
    errors = {line: complaint(f"# nodes\nbefore\n{line}\nafter\n") for line in WRONG_LINES}
    assert [line for line, error in errors.items() if not str(error).startswith("hosts.txt:3: ")] == []
    golden.check_errors("hostfile_lines", {ascii(line)[:60]: error for line, error in errors.items()})


def test_a_hostfile_without_a_node_is_an_error_with_an_example(golden: Golden) -> None:
    golden.check_errors("hostfile_empty", {ascii(text): complaint(text) for text in ("", "\n\n", "# only a comment\n")})


def test_more_nodes_than_anyone_has_are_refused_over_all_lines() -> None:
    assert len(nodes("a[1-4095]\nb")) == 4096
    assert str(complaint("a[1-4095]\nb\nc")) == "hosts.txt:3: there are more than 4096 nodes"


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_every_sample_is_a_hostfile_with_comments(path: Path) -> None:
    text = path.read_text()
    cluster = parse_hostfile(text, path.name)
    assert len(cluster.nodes) >= 2
    assert text.startswith("# ")


def test_the_two_boxes_of_the_published_run_are_there() -> None:
    sample = next(path for path in SAMPLES if path.name == "two4090.txt")
    assert nodes(sample.read_text()) == (
        Node(name="192.0.2.11", slots=2, gpus=(6, 7), addr="192.0.2.11", ifname="ens1f0"),
        Node(name="192.0.2.12", slots=2, gpus=(1, 6), addr="192.0.2.12", ifname="ens1f0"),
    )


@pytest.mark.parametrize("example", re.findall(r"^```hostfile\n(.*?)^```", REFERENCE, re.MULTILINE | re.DOTALL))
def test_every_example_of_the_reference_is_a_hostfile(example: str) -> None:
    assert nodes(example)


@pytest.mark.parametrize("key", [*KEYS, "env.NAME"])
def test_the_reference_has_an_example_of_every_key_that_is_right(key: str) -> None:
    row = re.search(rf"^\| `{re.escape(key)}=` \|[^|]+\| `(?P<example>[^`]+)` \|", REFERENCE, re.MULTILINE)
    assert row is not None
    assert nodes(f"node1 {row['example']}")


def test_the_ranges_of_the_reference_stand_for_what_it_says() -> None:
    table = REFERENCE.split("## Ranges")[1].split("## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|$", table, re.MULTILINE)
    assert len(rows) >= 4
    for pattern, names in rows:
        assert [node.name for node in nodes(pattern)] == names.split()


def test_the_errors_of_the_reference_are_those_that_are_shown() -> None:
    errors = REFERENCE.split("## Errors")[1]
    rows = re.findall(r"^\| `(node[^`]+)` \| (.+) \|$", errors, re.MULTILINE)
    assert len(rows) >= 8
    for line, message in rows:
        assert str(complaint(line)) == f"hosts.txt:1: {message}"


# What a hostfile can say: text without characters that do not print.
_printable = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" \t"), max_size=12)
_path = _printable.filter(lambda text: text.strip() != "" and not text.startswith("-"))
_word = st.text(string.ascii_letters + string.digits + "_.", min_size=1, max_size=12)
_names = st.lists(_word.filter(lambda name: name[0] != "."), min_size=1, max_size=3, unique=True).map(",".join)
# Numbers with dots between them are an address, or none.
_host = _word.filter(lambda name: not re.fullmatch(r"[0-9]+(?:\.[0-9]*)+", name))
_address = st.ip_addresses().map(str).filter(lambda text: text not in {"0.0.0.0", "::"})
_gpus = st.lists(st.integers(0, 1023), min_size=1, max_size=4, unique=True).map(tuple)
_money = st.floats(0, 1e12).map(abs)
_optional_node = st.fixed_dictionaries(
    {"name": _host | _address},
    optional={
        "slots": st.integers(1, 1024),
        "gpus": _gpus,
        "addr": _address,
        "ifname": _names,
        "hca": _names,
        "user": _word,
        "port": st.integers(1, 65535),
        "key": _path,
        "jump": _word,
        "ssh_config": _path,
        "slurm_job": st.integers(1, 999_999_999),
        "python": _path,
        "workdir": _path,
        "price": _money,
        "price_purchase_gpu": _money,
        "env": st.dictionaries(_word.filter(str.isidentifier), _printable, max_size=3),
    },
)


def _settled(fields: dict[str, object]) -> Node:
    node = msgspec.convert(fields, Node)
    return msgspec.structs.replace(node, slots=len(node.gpus)) if node.gpus is not None else node


_clusters = st.builds(
    Cluster,
    # No two lines are one machine.
    nodes=st.lists(
        _optional_node.map(_settled),
        min_size=1,
        max_size=4,
        unique_by=(lambda node: node.name.lower(), lambda node: str(node.addr or node.name)),
    ).map(tuple),
    source=st.just("hosts.txt"),
)


@given(_clusters)
def test_a_cluster_comes_back_from_its_hostfile_as_it_was(cluster: Cluster) -> None:
    assert parse_hostfile(render_hostfile(cluster), "hosts.txt") == cluster


_fragments = st.sampled_from(
    [
        "node",
        "[1-",
        "]",
        ",",
        "=",
        "slots=",
        "gpus=1,",
        "addr=",
        "env.A=",
        "@",
        "'",
        '"',
        "\\",
        "#",
        " ",
        "\n",
        "%",
        ":",
    ]
)


@given(st.text() | st.lists(_fragments | st.text(max_size=3), max_size=12).map("".join))
def test_whatever_is_in_a_hostfile_it_is_a_cluster_or_one_error_with_its_line(text: str) -> None:
    try:
        cluster = parse_hostfile(text, "hosts.txt")
    except HostfileError as error:
        assert str(error).startswith("hosts.txt:")  # noqa: PT017 - an error is one of two right answers
        assert str(error).split(":")[1].isdigit()  # noqa: PT017 - as above
    else:
        assert parse_hostfile(render_hostfile(cluster), "hosts.txt") == cluster


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("node1", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("gpu[1,3,5-7].lan", ["gpu1.lan", "gpu3.lan", "gpu5.lan", "gpu6.lan", "gpu7.lan"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[7]", ["n7"]),
    ],
)
def test_a_pattern_stands_for_these_names_in_this_order(pattern: str, names: list[str]) -> None:
    assert expand_ranges(pattern, 100) == names


def test_a_wrong_pattern_is_told_with_the_part_that_is_wrong(golden: Golden) -> None:
    wrong = ("node[1-", "node1]", "node[]", "node[a-c]", "node[1-2-3]", "node[\N{ARABIC-INDIC DIGIT ONE}]", "node[3-1]")
    golden.check_errors(
        "wrong_patterns", {pattern: raised(ValueError, expand_ranges, pattern, 100) for pattern in wrong}
    )


@pytest.mark.parametrize("pattern", ["n[1-101]", "n[1-60,1-60]", "n[1-20][1-20]", "n[0-999999999]", "n" + "[1-9]" * 40])
def test_too_many_names_are_refused_before_they_are_made(pattern: str) -> None:
    assert str(raised(ValueError, expand_ranges, pattern, 100)) == f"{pattern!r} expands to more than 100 names"


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("node1 slots=2", "node1 slots=2 env.A=1 env.B='x y'"),
        ("  node1  # the first", "  node1 env.A=1 env.B='x y'  # the first"),
        ("node1 env.A=7 slots=2  env.C=3", "node1 slots=2  env.C=3 env.A=1 env.B='x y'"),
        ("node1 slots=2 'env.B=old value'\r", "node1 slots=2 env.A=1 env.B='x y'\r"),
        ("\ufeffnode1 env.A=7", "\ufeffnode1 env.A=1 env.B='x y'"),
        ("# node1 env.A=7", "# node1 env.A=7"),
        ("", ""),
    ],
)
def test_variables_are_put_on_the_line_of_a_node_and_all_else_stays(line: str, written: str) -> None:
    text = f"{line}\nnode2\n"
    found = with_variables(text, {"A": "1", "B": "x y"})
    assert found == f"{written}\nnode2 env.A=1 env.B='x y'\n"
    for node in parse_hostfile(found).nodes:
        assert (node.env["A"], node.env["B"]) == ("1", "x y")


def test_variables_on_the_lines_of_a_pbs_nodefile_leave_its_slots() -> None:
    found = parse_hostfile(with_variables("n2\nn2\nn1\n", {"A": "1"})).nodes
    assert found == (Node(name="n2", slots=2, env={"A": "1"}), Node(name="n1", slots=1, env={"A": "1"}))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([], ""),
        ([0], "0"),
        ([0, 1], "0, 1"),
        ([0, 1, 2], "0-2"),
        (range(128), "0-127"),
        ([1, 3, 4, 6, 7, 8], "1, 3, 4, 6-8"),
        ([9, 10, 11], "9-11"),
        ([2, 1, 0], "2, 1, 0"),
    ],
)
def test_consecutive_numbers_are_a_range(numbers: Sequence[int], words: str) -> None:
    assert fold_numbers(numbers) == words


def test_the_limit_itself_is_allowed() -> None:
    assert len(expand_ranges("n[1-100]", 100)) == 100


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        ([], ""),
        (["node1"], "node1"),
        (["a", "b", "b1"], "a,b,b1"),
        (["node1", "node2", "node3"], "node[1-3]"),
        (["node08", "node09", "node10", "node12"], "node[08-10,12]"),
        (["node9", "node10"], "node[9-10]"),
        (["node2", "node1"], "node[2,1]"),
        (["n1", "n2", "gpu1.lan", "gpu2.lan", "n3"], "n[1-2],gpu[1-2].lan,n3"),
    ],
)
def test_names_fold_into_the_pattern_that_stands_for_them(names: list[str], pattern: str) -> None:
    assert fold_ranges(names) == pattern


@given(st.lists(st.from_regex(r"[a-z]{1,2}[0-9]{0,3}(\.[a-z])?", fullmatch=True), max_size=12))
def test_what_was_folded_stands_for_the_same_names_in_the_same_order(names: list[str]) -> None:
    patterns = re.findall(r"(?:\[[^\]]*\]|[^,\[])+", fold_ranges(names))
    assert [name for pattern in patterns for name in expand_ranges(pattern, 100)] == names
