from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from multinode.cluster.facts import ContentFact, NodeFacts
from multinode.node.facts.files import (
    ContentReader,
    digest_file,
    find_mount,
    list_files,
    look_at,
    read_model,
    read_revision,
)
from multinode.node.files import Mount, read_mounts
from multinode.stats.unknown import Unknown
from tests.golden import Golden, raised

from .localnode import LocalNode

MIB = 1 << 20
# /proc/self/mountinfo of a virtual machine with Debian 12; then lines as NFS, a path with a blank, and rootless podman
# show there.
CAPTURED = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24683656k
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard,resv_strict,resuid=65534,resgid=65534
41 27 0:44 / /home rw,relatime shared:23 - autofs systemd-1 rw,fd=50,pgrp=1,timeout=0,minproto=5,maxproto=5,direct
83 41 0:45 / /home rw,relatime shared:46 master:2 - nfs4 store:/export/home rw,vers=4.2,rsize=1048576
84 27 0:46 / /mnt/my\\040data rw - nfs store:/my\\040data rw
85 27 0:50 / /srv rw,nodev - fuse.fuse-overlayfs fuse-overlayfs rw,user_id=0
"""


def put(folder: Path, name: str, text: str = "x") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def read(folder: Path, *paths: str, datasets: tuple[str, ...] = (), **more: Any) -> dict[str, ContentFact]:
    facts = msgspec.convert(ContentReader(list(paths), list(datasets), str(folder), **more).facts(), list[ContentFact])
    return {fact.path: fact for fact in facts}


def test_a_small_file_is_hashed_whole(tmp_path: Path) -> None:
    path = put(tmp_path, "train.py", "print()")
    assert digest_file(str(path)) == (hashlib.sha256(b"print()").hexdigest(), 7)


def test_a_change_in_the_middle_of_a_tokenizer_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(bytes(9 * MIB))
    before = digest_file(str(path))
    with path.open("r+b") as file:
        file.seek(4 * MIB)
        file.write(b"other")
    assert digest_file(str(path)) != before


@pytest.mark.parametrize("name", ["model.safetensors", "mine.json"])
def test_a_large_file_is_known_by_its_size_and_both_ends(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(40 * MIB)
    before = digest_file(str(path))
    assert before[1] == 40 * MIB
    for place in (10, 40 * MIB - 10):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"other")
        changed = digest_file(str(path))
        assert changed != before
        before = changed


def test_zeros_of_another_length_are_another_file(tmp_path: Path) -> None:
    path = put(tmp_path, "model.safetensors")
    digests = set()
    for size in (40 * MIB, 41 * MIB):
        os.truncate(path, 0)
        os.truncate(path, size)
        digests.add(digest_file(str(path))[0])
    assert len(digests) == 2


def test_of_a_model_its_files_are_compared_and_not_what_lies_beside_them(tmp_path: Path) -> None:
    compared = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    for name in [*compared, "README.md", "trainer_log.jsonl", "optimizer.pt", "checkpoint-5/config.json"]:
        put(tmp_path / "model", name)
    os.mkfifo(tmp_path / "model" / "tokenizer.model")
    assert list(list_files("model", str(tmp_path), [])) == [f"model/{name}" for name in compared]
    assert list(list_files("nowhere", str(tmp_path), [])) == []


def test_of_a_dataset_directory_the_files_of_the_jobs_datasets_are_compared(tmp_path: Path) -> None:
    info = {
        "mine": {"file_name": "mine.json"},
        "parts": {"file_name": "parts"},
        "other": {"file_name": "other.json"},
        "hub": {"hf_hub_url": "owner/name"},
        "odd": {"file_name": "a\0b"},
        "gone": {"file_name": "gone.json"},
        "strange": 3,
    }
    put(tmp_path, "data/dataset_info.json", json.dumps(info))
    for name in ("mine.json", "other.json", "parts/1.json", "parts/2.json"):
        put(tmp_path, f"data/{name}")
    assert list(list_files("data", str(tmp_path), ["mine", "parts", "hub", "odd", "gone", "strange", "unknown"])) == [
        "data/dataset_info.json",
        "data/mine.json",
        "data/parts/1.json",
        "data/parts/2.json",
    ]


def test_entries_that_the_job_does_not_use_may_differ(tmp_path: Path) -> None:
    def digest(info: Any) -> str | Unknown:
        put(tmp_path, "data/dataset_info.json", json.dumps(info))
        return read(tmp_path, "data", datasets=("mine",))["data/dataset_info.json"].digest

    before = digest({"mine": {"file_name": "mine.json"}})
    assert digest({"other": {}, "mine": {"file_name": "mine.json"}}) == before
    assert digest({"mine": {"file_name": "mine.json", "ranking": True}}) != before
    assert not isinstance(digest(["no", "dataset"]), Unknown)


def test_what_is_too_much_or_too_slow_has_a_reason(tmp_path: Path) -> None:
    for number in range(300):
        put(tmp_path, f"model/{number:03}.safetensors")
    facts = read(tmp_path, "model")
    assert facts["model"] == ContentFact(path="model", digest=Unknown("more than 200 files"))
    assert len(facts) == 201
    put(tmp_path, "late.py")
    assert read(tmp_path, "late.py", deadline_s=-1)["late.py"].digest == Unknown("not read within -1 s")


def test_a_file_that_may_not_be_read_has_a_reason(tmp_path: Path) -> None:
    # A file of the kernel that is there and says no, to root as well.
    assert read(tmp_path, "/proc/self/mem")["/proc/self/mem"].digest == Unknown("Input/output error")


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_the_revision_of_a_checkout_is_the_one_that_git_tells(tmp_path: Path) -> None:
    assert read_revision(str(tmp_path)) is None
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    git(checkout, "init", "--quiet")
    assert read_revision(str(checkout)) is None
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "one")
    put(checkout, "deep/below/file")
    first = git(checkout, "rev-parse", "HEAD")
    assert read_revision(str(checkout / "deep" / "below")) == first
    git(checkout, "pack-refs", "--all")
    assert read_revision(str(checkout)) == first
    git(checkout, "worktree", "add", "--quiet", "-b", "other", str(tmp_path / "worktree"))
    git(tmp_path / "worktree", "commit", "--quiet", "--allow-empty", "--message", "two")
    second = git(tmp_path / "worktree", "rev-parse", "HEAD")
    assert read_revision(str(tmp_path / "worktree")) == second != first
    git(checkout, "checkout", "--quiet", "--detach", second)
    assert read_revision(str(checkout)) == second


@pytest.mark.parametrize("head", ["", "ref: ../../secret", "ref: refs/heads/gone", "no revision", "ref: a\0b"])
def test_what_is_no_revision_never_leaves_the_node(tmp_path: Path, head: str) -> None:
    put(tmp_path, ".git/HEAD", head)
    put(tmp_path, "secret", "a password")
    assert read_revision(str(tmp_path)) is None


def test_of_the_models_config_numbers_and_its_architecture_are_sent(tmp_path: Path) -> None:
    config = {"model_type": "qwen2", "hidden_size": 256, "tie_word_embeddings": True, "head_dim": None}
    others = {"api_key": "secret", "architectures": ["Qwen2"], "rope": {"key": "secret"}, "huge": 10**30}
    text = json.dumps({**config, **others})[:-1] + ', "odd": NaN}'
    put(tmp_path, "model/config.json", text)
    assert read_model("model", str(tmp_path)) == config


def test_a_config_that_is_none_is_refused(tmp_path: Path, golden: Golden) -> None:
    configs = {
        "empty": "",
        "a list": "[]",
        "half a mapping": "{",
        "too deep": '{"a":' * 100_000,
        "too long": json.dumps({"a": "x" * 300_000}),
    }

    def refused(text: str) -> ValueError:
        put(tmp_path, "model/config.json", text)
        return raised(ValueError, read_model, "model", str(tmp_path))

    golden.check_errors("no_config", {case: refused(text) for case, text in configs.items()}, tmp_path)


def test_a_probe_compares_what_it_is_asked_to(node: LocalNode) -> None:
    shutil.copytree(Path(__file__).parents[2] / "configs", node.home / "project" / "configs")
    put(node.home, "project/model/config.json", '{"model_type": "llama", "vocab_size": 7}')
    put(node.home, "project/data/dataset_info.json", '{"mine": {"file_name": "mine.json"}}')
    put(node.home, "project/data/mine.json", "[]")
    request = {"packages": False, "workdir": "~/project", "paths": ["model", "out"], "contents": ["model", "data"]}
    code, records = node.call("probe", {**request, "datasets": ["mine"], "model": "model"})
    assert code == 0
    facts = msgspec.convert(records[0], NodeFacts)
    assert [fact.path for fact in facts.contents] == [
        "model/config.json",
        "data/dataset_info.json",
        "data/mine.json",
    ]
    assert facts.contents[2].digest == hashlib.sha256(b"[]").hexdigest()
    assert facts.model_config == {"model_type": "llama", "vocab_size": 7}
    assert all(path.filesystem for path in facts.paths)
    code, records = node.call("probe", {"packages": False})
    assert (records[0]["contents"], records[0]["model"]["reason"]) == ([], "not asked for")
    code, records = node.call("probe", {"packages": False, "model": "/nowhere"})
    assert "No such file" in records[0]["model"]["reason"]


@pytest.fixture
def mountinfo(tmp_path: Path) -> str:
    return str(put(tmp_path, "mountinfo", CAPTURED))


def test_mounts_are_read_with_their_blanks(tmp_path: Path, mountinfo: str) -> None:
    mounts = read_mounts(mountinfo)
    assert len(mounts) == 7
    assert mounts[5] == Mount("/mnt/my data", "nfs", "store:/my data", "rw")
    broken = put(tmp_path, "broken", "27 1 254:0 / / rw\n\n - \ncut off - ext4 /dev/vda\n")
    assert read_mounts(str(broken)) == read_mounts(str(tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("path", "filesystem"),
    [
        ("/", "ext4"),
        ("/homework/x", "ext4"),
        ("/home", "nfs4"),
        ("/home/jane/data", "nfs4"),
        ("/dev/shm", "tmpfs"),
        ("/mnt/my data/x", "nfs"),
        ("/srv/x", "fuse.fuse-overlayfs"),
    ],
)
def test_a_path_lies_on_the_deepest_file_system_and_the_last_that_was_put_there(
    path: str, filesystem: str, mountinfo: str
) -> None:
    found = find_mount(path, read_mounts(mountinfo))
    assert found is not None
    assert found.filesystem == filesystem


def test_what_is_missing_lies_where_its_path_begins_to_exist(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    mounts = [Mount("/", "ext4", "/dev/vda"), Mount(os.path.realpath(tmp_path), "nfs", "store:/x")]
    assert look_at("out/new", str(tmp_path), mounts) == {
        "path": "out/new",
        "kind": "missing",
        "writable": True,
        "filesystem": "nfs",
        "device": "store:/x",
    }
    assert look_at("/nowhere", str(tmp_path), mounts)["filesystem"] == "ext4"
    assert look_at("x", str(tmp_path), [])["filesystem"] is None
    below = look_at("file/below", str(tmp_path), mounts)
    assert (below["kind"], below["writable"]) == ("missing", False)


def test_this_machine_tells_its_file_systems() -> None:
    found = find_mount("/proc/self", read_mounts())
    assert found is not None
    assert (found.place, found.filesystem) == ("/proc", "proc")
