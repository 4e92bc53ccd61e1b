"""Checkpoints as the agent sees them on two nodes without a shared file system, and which of them is chosen."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import msgspec
import pytest

from multinode.launch.checkpoints import Checkpoint, CheckpointChoice, choose_checkpoint
from multinode.node.run.checkpoints import look_at

from .localnode import LocalNode

RANKS = {"node0": (0, 1), "node1": (2, 3)}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class _Found(msgspec.Struct):
    checkpoints: tuple[Checkpoint, ...]


def tensors(path: Path) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "data_offsets": [0, 64]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))


def archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"x" * 100)


def save(folder: Path, step: int, ranks: tuple[int, ...]) -> Path:
    """A checkpoint as transformers leaves it with `save_on_each_node`, of a full training with two shards."""
    made = folder / f"checkpoint-{step}"
    made.mkdir(parents=True)
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", *(f"rng_state_{rank}.pth" for rank in ranks)):
        archive(made / name)
    for name in SHARDS:
        tensors(made / name)
    index = {"metadata": {}, "weight_map": {f"w{number}": name for number, name in enumerate(SHARDS)}}
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    (made / "trainer_state.json").write_text(json.dumps({"global_step": step, "max_steps": 200, "log_history": []}))
    (made / "config.json").write_text("not looked at")
    return made


@pytest.fixture
def nodes(tmp_path: Path) -> dict[str, Path]:
    for node, ranks in RANKS.items():
        for step in (100, 20):
            save(tmp_path / node / "output", step, ranks)
        (tmp_path / node / "output" / "checkpoint-best").mkdir()
    return {node: tmp_path / node for node in RANKS}


def choose(node: LocalNode, nodes: dict[str, Path]) -> CheckpointChoice:
    seen = {}
    for name, home in nodes.items():
        code, (answer,) = node.call("checkpoints", {"directory": "output", "cwd": str(home)})
        assert code == 0
        seen[name] = msgspec.convert(answer, _Found).checkpoints
    return choose_checkpoint(seen, RANKS)


def test_the_newest_is_chosen_by_its_number(node: LocalNode, nodes: dict[str, Path]) -> None:
    assert choose(node, nodes) == CheckpointChoice(name="checkpoint-100", step=100, max_steps=200)


def test_only_the_newest_are_read_if_that_is_enough(node: LocalNode, nodes: dict[str, Path]) -> None:
    code, (answer,) = node.call("checkpoints", {"directory": "output", "cwd": str(nodes["node0"]), "most": 1})
    assert (code, [one["name"] for one in answer["checkpoints"]]) == (0, ["checkpoint-100"])


def test_a_directory_that_is_not_there_has_none(node: LocalNode, tmp_path: Path) -> None:
    assert choose(node, dict.fromkeys(RANKS, tmp_path / "none")) == CheckpointChoice()


_ALL = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "model.safetensors.index.json", *SHARDS)


def seen_on(nodes: dict[str, Path]) -> dict[str, tuple[Checkpoint, ...]]:
    return {
        node: tuple(
            msgspec.convert({"name": one.name, **look_at(str(one))}, Checkpoint)
            for one in sorted((home / "output").glob("checkpoint-[0-9]*"))
        )
        for node, home in nodes.items()
    }


@pytest.mark.parametrize("damage", ["removed", "cut", "emptied"])
@pytest.mark.parametrize(
    ("where", "name"),
    [
        *(("node0", name) for name in (*_ALL, "rng_state_0.pth", "rng_state_1.pth")),
        *(("node1", name) for name in (*_ALL, "rng_state_2.pth", "rng_state_3.pth")),
    ],
)
def test_a_file_that_a_node_lacks_is_copied_or_the_checkpoint_before_is_chosen(
    nodes: dict[str, Path], where: str, name: str, damage: str
) -> None:
    for node in nodes if name in _ALL else (where,):
        path = nodes[node] / "output" / "checkpoint-100" / name
        if damage == "removed":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: -7 if damage == "cut" else 0])
    chosen = choose_checkpoint(seen_on(nodes), RANKS)
    assert (chosen.name, chosen.step, chosen.copies) == ("checkpoint-20", 20, ())
    # Without its index, shards are weights of nobody.
    said = "weights" if (name, damage) == ("model.safetensors.index.json", "removed") else name
    assert chosen.skipped["checkpoint-100"].startswith(f"{'node0' if name in _ALL else where}: ")
    assert said in chosen.skipped["checkpoint-100"]
    if name not in _ALL:
        return
    # The other node has it whole.
    other = "node1" if where == "node0" else "node0"
    good = nodes[other] / "output" / "checkpoint-100" / name
    good.write_bytes((nodes[other] / "output" / "checkpoint-20" / name).read_bytes())
    if name == "trainer_state.json":
        good.write_text(json.dumps({"global_step": 100, "max_steps": 200}))
    chosen = choose_checkpoint(seen_on(nodes), RANKS)
    assert (chosen.name, [(copy.source, copy.target) for copy in chosen.copies]) == ("checkpoint-100", [(other, where)])
    assert name in chosen.copies[0].paths


def test_shards_are_listed_with_their_sizes(node: LocalNode, tmp_path: Path) -> None:
    folder = tmp_path / "output" / "checkpoint-4"
    tag, fsdp = folder / "global_step4", folder / "optimizer_0"
    for made in (tag, fsdp, folder / "runs"):
        made.mkdir(parents=True)
    (folder / "latest").write_text("global_step4")
    (folder / "runs" / "not_looked_at.pt").write_text("x")
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        archive(tag / name)
    (tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt").write_bytes(b"PK")
    archive(fsdp / "__0_0.distcp")
    (fsdp / ".metadata").write_bytes(b"\x80\x04 __0_0.distcp __1_0.distcp __0_0.distcp .")
    code, (answer,) = node.call("checkpoints", {"directory": "output", "cwd": str(tmp_path)})
    (found,) = msgspec.convert(answer, _Found).checkpoints
    assert (code, found.tag, found.shards) == (
        0,
        "global_step4",
        ("optimizer_0/__0_0.distcp", "optimizer_0/__1_0.distcp"),
    )
    sizes = {path: file.size_bytes for path, file in found.files.items()}
    assert sizes == {
        str(path.relative_to(folder)): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "runs"
    }
    assert {path: file.problem for path, file in found.files.items() if file.problem is not None} == {
        "global_step4/zero_pp_rank_2_mp_rank_00_optim_states.pt": "File is not a zip file"
    }


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("latest", b"", "it is empty"),
        ("latest", b"../other", "it names no folder of shards"),
        ("optimizer_0/.metadata", b"", "it is empty"),
        ("optimizer_0/.metadata", b"\x80\x04 __0_0.distcp", "it is truncated"),
        ("optimizer_0/__0_0.distcp", b"", "it is empty"),
        # One tensor, and part of the next.
        ("optimizer_0/__0_0.distcp", b"PK\5\6" + bytes(18) + b"PK\3\4", "it is truncated"),
    ],
)
def test_a_file_of_a_sharded_checkpoint_that_is_not_whole(tmp_path: Path, name: str, data: bytes, problem: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    found = look_at(str(tmp_path))
    assert found["files"] == {name: {"size_bytes": len(data), "problem": problem}}
    assert (found["tag"], found["shards"]) == (None, [])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 13) + b'{"w": {"a":1}',
        struct.pack("<Q", 6000) + b"[" * 6000,
        struct.pack("<Q", 32) + b'{"w": {"data_offsets": [0,"x"]}}',
    ],
)
def test_weights_of_any_content_are_unreadable_and_not_an_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "trainer_state.json").write_bytes(b"[" * 100_000)
    (tmp_path / "optimizer.pt").mkdir()
    found = look_at(str(tmp_path))
    assert sorted(name for name, file in found["files"].items() if file["problem"]) == sorted(
        path.name for path in tmp_path.iterdir()
    )
