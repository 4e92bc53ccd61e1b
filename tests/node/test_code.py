"""The verb `code`: what is sent of a tree, what it looks like on the node, and what a tree cannot do."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from .localnode import Conversation, LocalNode

FILES = {"train.py": b"print(1)", "lib/a.py": b"a" * 100_000, "two\nlines": b"", "bin/run": b"#!/bin/sh\n"}
LINKS = {"link": "lib/a.py", "lib/up": "../train.py", "folder": "lib"}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def ask(files: dict[str, bytes], links: dict[str, str] | None = None, run_id: str = "r1") -> dict[str, Any]:
    listed = [["f", path, len(data), 0o700 if path.startswith("bin/") else 0o600, 0] for path, data in files.items()]
    return request([*listed, *(["l", *link] for link in (links or {}).items())], map(sha, files.values()), run_id)


def request(entries: list[list[Any]], digests: Iterable[str], run_id: str = "r1") -> dict[str, Any]:
    """With the directories of what is listed."""
    folders = {str(folder) for entry in entries for folder in PurePosixPath(entry[1]).parents} - {".", "/"}
    listed = [[0, "d", folder, 0o700] for folder in sorted(folders)] + [[0, entry[0], *entry[1:]] for entry in entries]
    manifest = json.dumps({"roots": [0o700], "entries": listed})
    return {"run_id": run_id, "manifest": manifest, "digests": list(digests)}


def send(talk: Conversation, files: dict[str, bytes], wanted: list[int]) -> int:
    """Send what is wanted, in pieces; how many bytes that were."""
    sent = 0
    for number in wanted:
        data = list(files.values())[number]
        for at in range(0, len(data), 40_000):
            piece = data[at : at + 40_000]
            sent += len(piece)
            talk.send({"file": number, "data": base64.b64encode(piece).decode()})
    return sent


def copy(
    node: LocalNode, files: dict[str, bytes], links: dict[str, str] | None = None, run_id: str = "r1"
) -> list[str]:
    """Copy a tree; the names that were sent."""
    with node.talk("code", ask(files, links, run_id)) as talk:
        wanted = talk.take("wanted")["files"]
        send(talk, files, wanted)
        assert talk.take("copied")["path"] == str(tree(node, run_id))
    return [list(files)[number] for number in wanted]


def tree(node: LocalNode, run_id: str = "r1") -> Path:
    return node.home / ".multinode" / "code" / run_id / "tree"


def left(node: LocalNode) -> list[str]:
    """What lies beside the store and the trees, and in the store without being whole."""
    root = node.home / ".multinode" / "code"
    return [path.name for folder in (root, root / ".store") for path in folder.glob(".*") if path.name != ".store"]


def test_the_tree_is_what_was_announced(node: LocalNode) -> None:
    assert copy(node, FILES, LINKS) == list(FILES)
    made = tree(node)
    assert {path: (made / path).read_bytes() for path in FILES} == FILES
    assert {path: str((made / path).readlink()) for path in LINKS} == LINKS
    assert {path: (made / path).stat().st_mode & 0o777 for path in FILES} == {
        path: 0o700 if path == "bin/run" else 0o600 for path in FILES
    }
    assert (node.home / ".multinode" / "code").stat().st_mode & 0o077 == 0
    assert left(node) == []


def test_only_what_is_new_is_sent_and_equal_content_once(node: LocalNode) -> None:
    copy(node, FILES)
    changed = {**FILES, "lib/a.py": b"b", "lib/c.py": b"b", "again.py": FILES["train.py"]}
    assert copy(node, changed, run_id="r2") == ["lib/a.py"]
    assert {path: (tree(node, "r2") / path).read_bytes() for path in changed} == changed
    # The other run's tree is as it was, whatever a job does to its own.
    (tree(node, "r2") / "train.py").write_bytes(b"changed by its job")
    assert copy(node, FILES, run_id="r3") == []
    assert (tree(node, "r3") / "train.py").read_bytes() == (tree(node) / "train.py").read_bytes() == FILES["train.py"]


def test_attempts_of_a_run_share_its_tree_and_other_code_is_refused_there(node: LocalNode) -> None:
    copy(node, FILES)
    (tree(node) / "checkpoint").write_text("of the first attempt")
    assert copy(node, FILES) == []
    assert (tree(node) / "checkpoint").read_text() == "of the first attempt"
    assert "holds other code than this run's" in node.error("code", ask({"train.py": b"2"}))


@pytest.mark.parametrize(
    ("files", "links", "said"),
    [
        (["../x"], {}, "may not be copied"),
        (["/etc/x"], {}, "may not be copied"),
        (["a/../../x"], {}, "may not be copied"),
        (["a/./x"], {}, "may not be copied"),
        (["a//x"], {}, "may not be copied"),
        ([""], {}, "may not be copied"),
        (["a\0b"], {}, "may not be copied"),
        (["a", "a"], {}, "may not be copied"),
        (["a"], {"a": "b"}, "may not be copied"),
        (["a", "a/b"], {}, "may not be copied"),
        ([], {"l": "a", "l/x": "y"}, "may not be copied"),
        (["a/.x.multinode-copy"], {}, "may not be copied"),
        (["a"], {"../l": "a"}, "may not be copied"),
        (["a"], {"l": "/etc/passwd"}, "leads elsewhere"),
        (["a"], {"l": "../../x"}, "leads elsewhere"),
        (["a"], {"d/l": "../../x"}, "leads elsewhere"),
        # Through another link, though its own words stay inside.
        (["p/q/a"], {"p/q/top": "../..", "l": "p/q/top/../../x"}, "leads elsewhere"),
    ],
)
def test_no_path_and_no_link_leads_out_of_the_tree(
    node: LocalNode, files: list[str], links: dict[str, str], said: str
) -> None:
    entries: list[list[Any]] = [
        *(["f", path, 1, 0o600, 0] for path in files),
        *(["l", *link] for link in links.items()),
    ]
    with node.talk("code", request(entries, [sha(b"x")] * len(files))) as talk:
        talk.send({"file": 0, "data": base64.b64encode(b"x").decode()})
        assert said in talk.read_all()[-1]["message"]
    outside = [path for path in node.home.rglob("*") if ".multinode" not in path.parts]
    assert (tree(node).exists(), left(node), outside) == (False, [], [])


@pytest.mark.parametrize("run_id", ["../r", "", ".store", "a/b"])
def test_a_run_id_is_no_path(node: LocalNode, run_id: str) -> None:
    assert "not a run id" in node.error("code", ask(FILES, run_id=run_id))


@pytest.mark.parametrize("digest", ["../../agent/x", "0" * 63, "G" * 64])
def test_a_digest_is_no_path(node: LocalNode, digest: str) -> None:
    assert "not a digest" in node.error("code", request([["f", "a", 1, 0o600, 0]], [digest]))


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([(0, b"other...")], "train.py changed while it was copied"),
        ([(0, b"print(1) and more")], "is not what was announced"),
        ([(1, b"print(1)")], "is not what was announced"),
    ],
)
def test_what_was_not_announced_is_not_kept(node: LocalNode, pieces: list[tuple[int, bytes]], said: str) -> None:
    with node.talk("code", ask(FILES)) as talk:
        for number, data in pieces:
            talk.send({"file": number, "data": base64.b64encode(data).decode()})
        assert said in talk.read_all()[-1]["message"]
    assert (tree(node).exists(), left(node)) == (False, [])


def test_a_controller_that_goes_away_leaves_no_half_tree_and_what_came_is_not_sent_again(node: LocalNode) -> None:
    with node.talk("code", ask(FILES)) as talk:
        wanted = talk.take("wanted")["files"]
        send(talk, FILES, wanted[:1])
        talk.send({"file": 1, "data": base64.b64encode(b"a" * 100).decode()})
        assert talk.hang_up() == 1
        assert "the controller went away" in talk.records[-1]["message"]
    assert (tree(node).exists(), left(node)) == (False, [])
    assert copy(node, FILES) == list(FILES)[1:]


def test_what_is_damaged_in_the_store_is_sent_again(node: LocalNode) -> None:
    copy(node, FILES)
    (node.home / ".multinode" / "code" / ".store" / sha(FILES["train.py"])).write_bytes(b"print(2)")
    assert copy(node, FILES, run_id="r2") == ["train.py"]
    assert (tree(node, "r2") / "train.py").read_bytes() == b"print(1)"


def test_a_disk_without_room_is_said_before_anything_is_written(node: LocalNode) -> None:
    assert "MiB are free" in node.error("code", request([["f", "a", 1 << 43, 0o600, 0]], [sha(b"x")]))
    assert [path.name for path in (node.home / ".multinode" / "code").rglob("*")] == [".store"]


def clean(node: LocalNode, code: list[str] | None, *, older_s: float = 0.0) -> tuple[int, list[str]]:
    run_ids = None if code is None else [f"{run_id}.0" for run_id in code]
    status, (record,) = node.call("clean", {"run_ids": run_ids, "code": code, "older_s": older_s})
    assert (status, record["kind"]) == (0, "cleaned")
    return record["code_bytes"], [Path(path).parent.name for path in record["code_kept"]]


def test_a_tree_goes_with_its_run_and_what_is_stored_stays_for_the_next(node: LocalNode) -> None:
    copy(node, FILES)
    copy(node, FILES, run_id="r2")
    (tree(node) / "lib" / "__pycache__").mkdir()
    (tree(node) / "lib" / "__pycache__" / "a.pyc").write_text("compiled")
    freed, kept = clean(node, ["r1"])
    assert freed > sum(map(len, FILES.values()))
    assert (kept, tree(node).parent.exists(), tree(node, "r2").exists()) == ([], False, True)
    assert copy(node, FILES, run_id="r3") == []


def test_what_a_job_has_written_is_not_removed(node: LocalNode) -> None:
    copy(node, FILES)
    (tree(node) / "checkpoint-5").mkdir()
    (tree(node) / "checkpoint-5" / "model").write_text("weights")
    assert clean(node, ["r1"]) == (0, ["r1"])
    assert (tree(node) / "checkpoint-5" / "model").exists()


def test_a_tree_stays_while_a_run_or_an_attempt_uses_it(node: LocalNode) -> None:
    for run_id in ("r1", "r2", "r3"):
        copy(node, FILES, run_id=run_id)
    with node.supervise([*node.script("import time; time.sleep(600)")], "r1-2.0") as talk:
        talk.read_until(kind="status", state="running")
        clean(node, ["r1", "r1-2", "r2"])
        assert [tree(node, run_id).exists() for run_id in ("r1", "r2", "r3")] == [True, False, True]
        talk.stop()
    clean(node, ["r1", "r1-2"])
    assert [tree(node, run_id).exists() for run_id in ("r1", "r3")] == [False, True]


def test_without_a_run_old_trees_go_and_what_is_stored_unused(node: LocalNode) -> None:
    for run_id in ("old", "new"):
        copy(node, FILES if run_id == "old" else {"train.py": b"2"}, run_id=run_id)
    root = node.home / ".multinode" / "code"
    long_ago = time.time() - 10 * 86400
    os.utime(root / "old", (long_ago, long_ago))
    (root / ".unfinished").mkdir()
    os.utime(root / ".unfinished", (long_ago, long_ago))
    for path in (root / ".store").iterdir():
        if path.name != sha(b"2"):
            os.utime(path, (long_ago, long_ago))
    assert clean(node, None, older_s=7 * 86400.0)[1] == []
    assert sorted(path.name for path in root.iterdir()) == [".store", "new"]
    assert [path.name for path in (root / ".store").iterdir()] == [sha(b"2")]
    # What was made just now may be about to be used.
    clean(node, None)
    assert tree(node, "new").exists()
