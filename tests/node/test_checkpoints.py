"""Checkpoints as the agent sees them on two nodes without a shared file system, and which of them is chosen."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import msgspec
import pytest

from multinode.launch.restart import Checkpoint, CheckpointChoice, choose_checkpoint
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


def test_a_directory_that_is_not_there_has_none(node: LocalNode, tmp_path: Path) -> None:
    assert choose(node, dict.fromkeys(RANKS, tmp_path / "none")) == CheckpointChoice()


_ALL = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "model.safetensors.index.json", *SHARDS)


@pytest.mark.parametrize("damage", ["removed", "cut", "emptied"])
@pytest.mark.parametrize(
    ("where", "name"),
    [
        *(("node0", name) for name in (*_ALL, "rng_state_0.pth", "rng_state_1.pth")),
        *(("node1", name) for name in (*_ALL, "rng_state_2.pth", "rng_state_3.pth")),
    ],
)
def test_without_any_one_file_the_checkpoint_before_is_chosen(
    nodes: dict[str, Path], where: str, name: str, damage: str
) -> None:
    path = nodes[where] / "output" / "checkpoint-100" / name
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: -7 if damage == "cut" else 0])
    seen = {
        node: tuple(
            msgspec.convert({"name": one.name, **look_at(str(one))}, Checkpoint)
            for one in sorted((home / "output").glob("checkpoint-[0-9]*"))
        )
        for node, home in nodes.items()
    }
    chosen = choose_checkpoint(seen, RANKS)
    assert (chosen.name, chosen.step) == ("checkpoint-20", 20)
    # Without its index, shards are weights of nobody.
    said = "weights" if (name, damage) == ("model.safetensors.index.json", "removed") else name
    assert chosen.skipped["checkpoint-100"].startswith(f"{where}: ")
    assert said in chosen.skipped["checkpoint-100"]


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
    assert sorted(name for name, problem in found["files"].items() if problem) == sorted(
        path.name for path in tmp_path.iterdir()
    )
