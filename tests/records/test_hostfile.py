from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from multinode.cluster.cluster import Node
from multinode.errors import HostfileError, MultinodeError
from multinode.records.allocation import load_allocation
from multinode.records.hostfile import RunningLab, find_hosts, load_hostfile
from multinode.records.prices import load_prices
from multinode.records.settings import Defaults, Settings
from tests.golden import Golden, error_of

NOTHING = Settings()
TOML = Settings(defaults=Defaults(hosts="toml.txt"))
RUNNING = Path("/run/lab/hosts.txt")
NAMED = Settings(defaults=Defaults(hosts="@pair"), hosts={"pair": "a:2,b:2", "virtual": "lab"})


def test_a_hostfile_is_read_and_its_text_kept(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("# mine\nnode1 slots=2\n")
    cluster, text = load_hostfile(path)
    assert cluster.nodes == (Node(name="node1", slots=2),)
    assert cluster.source == str(path)
    assert text == "# mine\nnode1 slots=2\n"


def test_a_name_that_stands_twice_is_told(tmp_path: Path) -> None:
    path, notes = tmp_path / "nodes", list[str]()
    path.write_text("node1\nnode1\nnode2\n")
    cluster, _ = load_hostfile(path, notes.append)
    assert [node.slots for node in cluster.nodes] == [2, 1]
    assert notes == [f"{path} names node1 2 times, once for each of its workers"]


def test_nodes_may_be_named_in_place_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cluster, text = load_hostfile(Path("node1,node2:4"))
    assert cluster.nodes == (Node(name="node1"), Node(name="node2", slots=4))
    assert (cluster.source, text) == ("node1,node2:4", "node1,node2:4\n")
    # Longer than the name of a file may be.
    assert len(load_hostfile(Path(",".join(f"node{number}" for number in range(1000))))[0].nodes) == 1000
    notes = list[str]()
    assert load_hostfile(Path("a,a,b"), notes.append)[0].nodes == (Node(name="a", slots=2), Node(name="b", slots=1))
    assert notes == ["a,a,b names a 2 times, once for each of its workers"]


def test_a_file_wins_over_a_list_and_a_group_of_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b").write_text("node1\n")
    (tmp_path / "gpu").write_text(json.dumps({"_meta": {"hostvars": {}}, "4": {"hosts": ["node2"]}}))
    assert load_hostfile(Path("a,b"))[0].nodes == (Node(name="node1"),)
    assert load_hostfile(Path("gpu:4"))[0].nodes == (Node(name="node2"),)


def test_a_hostfile_that_cannot_be_read_is_refused_with_what_to_write(tmp_path: Path, golden: Golden) -> None:
    texts = {
        "wrong.txt": "node1\nnode2 slots=none\n",
        "ssh_config": "Host n1\n  HostName 10.0.0.1\n",
        "hosts.yaml": "name: lab\nhosts:\n- n1\n- n2\n",
        "list.yaml": "- node1 slots=2\n",
        "hosts.json": '{"hosts": ["n1"]}',
    }
    for name, text in texts.items():
        _written(tmp_path / name, text)
    (tmp_path / "empty").mkdir()
    typed = (*texts, "ssh_config:gpu", "hosts.yaml:gpu", "hosts.json:gpu", "empty/gone.txt")
    golden.check_errors(
        "hostfile", {name: error_of(load_hostfile, Path(f"{tmp_path}/{name}")) for name in typed}, tmp_path
    )


def test_brackets_of_an_ipv6_address_begin_no_inventory(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("[2001:db8::1] slots=2\n[2001:db8::2]\n")
    cluster, _ = load_hostfile(path)
    assert [node.name for node in cluster.nodes] == ["2001:db8::1", "2001:db8::2"]


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


INVENTORY = "[gpu]\nn[1:2] ansible_host=10.0.0.9 weight=3\n[cpu]\nc1 ansible_user=bob weight=3\n"
LISTING = json.dumps(
    {
        "_meta": {
            "hostvars": {
                "c1": {"ansible_user": "bob", "weight": 3},
                **{name: {"ansible_host": "10.0.0.9", "weight": 3} for name in ("n1", "n2")},
            }
        },
        "all": {"children": ["gpu", "cpu"]},
        "gpu": {"hosts": ["n1", "n2"]},
        "cpu": {"hosts": ["c1"]},
    }
)


@pytest.fixture
def ansible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`ansible-inventory` on PATH, which answers with the listing of these inventories, or fails."""
    program = tmp_path / "bin" / "ansible-inventory"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\ncase $1 in *broken*) echo '[ERROR]: no' >&2; exit 1;; esac\n"
        f'[ "$2" = --list ] && cat <<E\n{LISTING}\nE\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


@pytest.mark.usefixtures("ansible")
def test_a_group_of_an_inventory_becomes_a_hostfile_and_what_is_ignored_is_told(tmp_path: Path) -> None:
    path, notes = tmp_path / "inventory.ini", list[str]()
    path.write_text(INVENTORY)
    cluster, text = load_hostfile(Path(f"{path}:cpu"), notes.append)
    assert cluster.nodes == (Node(name="c1", user="bob"),)
    assert text == f"# The group cpu of {path}.\nc1 user=bob\n"
    assert notes == [f"{path}: ignored: weight"]


@pytest.mark.usefixtures("ansible")
def test_an_inventory_may_be_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "cluster"
    path.mkdir()
    assert load_hostfile(Path(f"{path}:cpu"))[0].nodes == (Node(name="c1", user="bob"),)


def test_what_is_wrong_with_an_inventory_is_told(
    tmp_path: Path, ansible: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    for name in ("inventory.ini", "broken", "writable"):
        _written(tmp_path / name, INVENTORY)
    (tmp_path / "writable").chmod(0o666)
    with pytest.raises(HostfileError, match="is writable by others"):
        load_hostfile(Path(f"{tmp_path}/writable:gpu"))

    def refused(given: str) -> MultinodeError:
        return error_of(load_hostfile, Path(f"{tmp_path}/{given}"))

    cases = {
        "no group": refused("inventory.ini"),
        "two names of one node": refused("inventory.ini:gpu"),
        "Ansible cannot read it": refused("broken:gpu"),
    }
    monkeypatch.setenv("PATH", str(ansible.parent.parent))
    cases["without Ansible"] = refused("inventory.ini:gpu")
    golden.check_errors("inventory", cases, tmp_path)


def test_a_file_whose_name_has_a_colon_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts:gpu"
    path.write_text("node1\n")
    (tmp_path / "hosts").write_text("node2\n")
    assert load_hostfile(path)[0].nodes == (Node(name="node1"),)


@pytest.mark.parametrize(
    ("name", "data", "nodes"),
    [
        ("-", b"node1 slots=4 max_slots=8\n", (Node(name="node1", slots=4),)),
        ("-", b"n1\nn1\n", (Node(name="n1", slots=2),)),
        ("-:cpu", LISTING.encode(), (Node(name="c1", user="bob"),)),
    ],
)
def test_standard_input_is_read(
    monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, nodes: tuple[Node, ...]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert load_hostfile(Path(name))[0].nodes == nodes


def test_what_is_wrong_with_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    def refusal(data: bytes) -> MultinodeError:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        return error_of(load_hostfile, Path("-"))

    golden.check_errors("standard_input", {str(data): refusal(data) for data in (b"node1 slots=x\n", b"\xff")})


def test_the_file_with_the_nearest_name_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("hosts.txt", "train.yaml"):
        (tmp_path / name).touch()
    typed = ("host.txt", "hostss.txt:gpu", "tra", "hosts")
    golden.check_errors("nearest_name", {f"--hosts {name}": error_of(load_hostfile, Path(name)) for name in typed})


@pytest.mark.parametrize(
    ("option", "environ", "settings", "lab", "expected"),
    [
        ("o.txt", {"MULTINODE_HOSTS": "e.txt"}, TOML, RUNNING, (Path("o.txt"), "--hosts")),
        (None, {"MULTINODE_HOSTS": "e.txt"}, TOML, RUNNING, (Path("e.txt"), "$MULTINODE_HOSTS")),
        (None, {"MULTINODE_HOSTS": ""}, TOML, RUNNING, (Path("toml.txt"), "multinode.toml")),
        (None, {}, TOML, RUNNING, (Path("toml.txt"), "multinode.toml")),
        (None, {}, NOTHING, RUNNING, (RUNNING, "the lab that was started in this directory")),
        (None, {}, NAMED, RUNNING, (Path("a:2,b:2"), "multinode.toml, @pair")),
        ("@pair", {}, NAMED, RUNNING, (Path("a:2,b:2"), "--hosts, @pair")),
        (None, {"MULTINODE_HOSTS": "@virtual"}, NAMED, RUNNING, (RUNNING, "$MULTINODE_HOSTS, @virtual")),
        ("lab", {"MULTINODE_HOSTS": "e.txt"}, TOML, RUNNING, (RUNNING, "--hosts")),
        (None, {"MULTINODE_HOSTS": "lab"}, TOML, RUNNING, (RUNNING, "$MULTINODE_HOSTS")),
        (None, {}, Settings(defaults=Defaults(hosts="lab")), RUNNING, (RUNNING, "multinode.toml")),
        ("./lab", {}, NOTHING, RUNNING, (Path("lab"), "--hosts")),
        ("auto", {}, TOML, RUNNING, (None, "--hosts")),
        (None, {"MULTINODE_HOSTS": "auto"}, NOTHING, None, (None, "$MULTINODE_HOSTS")),
        ("./auto", {}, NOTHING, None, (Path("auto"), "--hosts")),
    ],
)
def test_the_nearest_word_wins(
    option: str | None, environ: dict[str, str], settings: Settings, lab: Path | None, expected: tuple[Path | None, str]
) -> None:
    running = None if lab is None else RunningLab(lab, Path.cwd())
    assert find_hosts(option, environ, settings, lambda: running) == expected


def test_a_lab_that_was_started_elsewhere_must_be_named() -> None:
    elsewhere = RunningLab(RUNNING, Path("/srv/colleague"))
    assert find_hosts("lab", {}, NOTHING, lambda: elsewhere) == (RUNNING, "--hosts")
    settings = Settings(defaults=Defaults(hosts="lab"))
    assert find_hosts(None, {}, settings, lambda: elsewhere) == (RUNNING, "multinode.toml")


def test_where_no_hosts_are_found_every_way_to_give_them_is_named(golden: Golden) -> None:
    elsewhere = RunningLab(RUNNING, Path("/srv/colleague"))
    golden.check_errors(
        "no_hosts",
        {
            "none are given": error_of(find_hosts, None, {}, NOTHING, lambda: None),
            "none are given, and somebody's lab runs": error_of(find_hosts, None, {}, NOTHING, lambda: elsewhere),
            "--hosts lab, and none runs": error_of(find_hosts, "lab", {}, TOML, lambda: None),
            "--hosts @lab2, and others have names": error_of(find_hosts, "@lab2", {}, NAMED, lambda: None),
            "--hosts @lab2, and none has a name": error_of(find_hosts, "@lab2", {}, NOTHING, lambda: None),
            "--hosts auto without a scheduler": error_of(load_allocation, {}, lambda _: None),
        },
    )


def test_what_a_scheduler_gave_is_shown_as_a_hostfile() -> None:
    notes = list[str]()
    cluster, text = load_allocation(
        {"DSTACK_NODES_IPS": "192.0.2.1\n192.0.2.2", "DSTACK_GPUS_PER_NODE": "2"}, notes.append
    )
    assert [(node.name, node.slots) for node in cluster.nodes] == [("192.0.2.1", 2), ("192.0.2.2", 2)]
    assert text == "# dstack: $DSTACK_NODES_IPS\n192.0.2.1 slots=2\n192.0.2.2 slots=2\n"
    assert notes == ["hostfile from dstack:\n  192.0.2.1 slots=2\n  192.0.2.2 slots=2"]


def test_the_home_directory_may_be_written_short() -> None:
    assert find_hosts("~/hosts.txt", {}, NOTHING, lambda: None)[0] == Path.home() / "hosts.txt"


SAMPLE = Path(__file__).parents[2] / "configs" / "figures" / "gpu_prices.yaml"


def test_the_sample_file_is_read_and_its_text_kept() -> None:
    prices, text = load_prices(SAMPLE)
    found = prices.of_device("NVIDIA GeForce RTX 4090")
    assert found is not None
    assert (prices.currency, found.purchase) == ("CNY", 15000)
    assert text == SAMPLE.read_text()


def test_what_the_sample_has_commented_out_is_right_as_well(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(SAMPLE.read_text().replace("# nodes:\n#   node1:", "nodes:\n  node1:"))
    assert load_prices(path)[0].nodes["node1"].hourly == 2.8


def test_prices_that_cannot_be_read_are_refused(tmp_path: Path, golden: Golden) -> None:
    wrong = _written(tmp_path / "wrong.yaml", "currency: EUR\nnodes:\n  a: {hourly: cheap}\n")
    cases = {path.name: error_of(load_prices, path) for path in (wrong, tmp_path / "none.yaml")}
    golden.check_errors("prices", cases, tmp_path)
