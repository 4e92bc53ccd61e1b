"""--fetch of a checkpoint of ZeRO or FSDP, of which each of two nodes has its own part."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from multinode.cluster.cluster import Node
from multinode.copy.fetch import Fetched, Wanted
from multinode.errors import ContactLost
from multinode.launch.context import Launched
from multinode.launch.shard_fetch import fetch_shards
from multinode.records.run import NodeRun
from multinode.records.run_directory import RunDirectory
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.fake import FakeTransport
from tests import make

FOLDER = "checkpoint-8/global_step8"
HERE = ("checkpoint-8/latest", f"{FOLDER}/zero_pp_rank_0_mp_rank_00_optim_states.pt")
SHARD = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


class _Nodes:
    """Says what the other node is asked for, and sends it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []

    def answer(self, node: Node, _command: str, stdin: bytes) -> list[bytes]:
        request = json.loads(stdin.splitlines()[-1])
        self.asked.append((node.name, request["paths"]))
        names = [Path(path).name for path in request["paths"]]
        records: list[dict[str, Any]] = [
            {"kind": "files", "files": [{"name": name, "size_bytes": 2} for name in names]},
            *({"kind": "data", "file": n, "data": base64.b64encode(b"ab").decode()} for n in range(len(names))),
            {"kind": "fetched"},
        ]
        return [json.dumps(record).encode() + b"\n" for record in records]


def fetch(tmp_path: Path, *names: str, state: str = "ended") -> tuple[_Nodes, list[str]]:
    """After what came from node a; what the nodes were asked, and what was said."""
    nodes, said = _Nodes(), list[str]()
    run = make.run(NodeRun(name="a", node_rank=0), NodeRun(name="b", node_rank=1, state=state))
    launched = Launched(
        run=run, summary=make.no_steps(), plan=make.plan("a", "b"), directory=RunDirectory(tmp_path / "r")
    )
    wanted = Wanted(node=Node(name="a"), paths=("out/checkpoint-8/",), cwd="/home/me")
    fetched = Fetched(directory=tmp_path / "fetched", files=names, size_bytes=1)
    agent = AgentTransport(FakeTransport(nodes.answer), AgentArchive(b""))
    fetch_shards(agent, launched, make.cluster("a", "b"), wanted, fetched, say=said.append)
    return nodes, said


def test_the_other_nodes_shards_are_put_beside_those_of_node_0(tmp_path: Path) -> None:
    nodes, said = fetch(tmp_path, *HERE)
    assert nodes.asked == [("b", [f"out/{FOLDER}/{SHARD}"])]
    assert (tmp_path / "fetched" / FOLDER / SHARD).read_bytes() == b"ab"
    checkpoint = tmp_path / "fetched" / "checkpoint-8"
    assert said == [
        f"fetched 1 file (2 B) of {FOLDER} from b",
        f"merge the parameters into one file: python {checkpoint}/zero_to_fp32.py {checkpoint} OUTPUT_DIR",
    ]


def test_of_fsdp_only_the_parameters_are_converted(tmp_path: Path) -> None:
    folders = ("optimizer_0", "pytorch_model_fsdp_0")
    here = (f"checkpoint-8/{folder}/{name}" for folder in folders for name in (".metadata", "__0_0.distcp"))
    nodes, said = fetch(tmp_path, "checkpoint-8/trainer_state.json", *here)
    assert nodes.asked == [("b", [f"out/checkpoint-8/{folder}/__1_0.distcp"]) for folder in folders]
    parameters = tmp_path / "fetched/checkpoint-8/pytorch_model_fsdp_0"
    assert said == [
        *(f"fetched 1 file (2 B) of checkpoint-8/{folder} from b" for folder in folders),
        f"merge the parameters into one file: accelerate merge-weights {parameters} OUTPUT_DIR",
    ]


def test_what_is_here_already_is_not_fetched_again(tmp_path: Path) -> None:
    nodes, said = fetch(tmp_path, *HERE, f"{FOLDER}/{SHARD}")
    assert (nodes.asked, said) == ([], [])


def test_shards_of_a_lost_node_are_missed_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ContactLost, match="its shards were not fetched") as caught:
        fetch(tmp_path, *HERE, state="lost")
    assert caught.value.node == "b"
