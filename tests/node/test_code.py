"""The verb `code`: what is sent of a tree, what it looks like on the node, and what a tree cannot do."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import shutil
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from multinode.node.copies import wire
from multinode.node.copies.exchange import ask_lacking, pack_digests, send_blocks
from multinode.node.copies.wire import Pipe, Wire
from multinode.node.manifest import BLOCK_BYTES, DIGEST_BYTES
from tests.golden import Golden

from .localnode import Conversation, LocalNode

FILES = {"train.py": b"print(1)", "lib/a.py": b"a" * 100_000, "two\nlines": b"", "bin/run": b"#!/bin/sh\n"}
LINKS = {"link": "lib/a.py", "lib/up": "../train.py", "folder": "lib"}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def ask(files: dict[str, bytes], links: dict[str, str] | None = None, run_id: str = "r1") -> dict[str, Any]:
    listed = [["f", path, len(data), 0o700 if path.startswith("bin/") else 0o600, None] for path, data in files.items()]
    return request([*listed, *(["l", *link] for link in (links or {}).items())], blocks_of(files), run_id)


def blocks_of(files: dict[str, bytes]) -> list[bytes]:
    """Content of all blocks, in their order."""
    return [data[at : at + BLOCK_BYTES] for data in files.values() for at in range(0, len(data), BLOCK_BYTES)]


def request(entries: list[list[Any]], blocks: Iterable[bytes], run_id: str = "r1") -> dict[str, Any]:
    """With the directories of what is listed."""
    folders = {str(folder) for entry in entries for folder in PurePosixPath(entry[1]).parents} - {".", "/"}
    listed = [[0, "d", folder, 0o700] for folder in sorted(folders)] + [[0, entry[0], *entry[1:]] for entry in entries]
    manifest = json.dumps({"roots": [0o700], "entries": listed}).encode()
    digests = b"".join(hashlib.sha256(block).digest() for block in blocks)
    said: list[bytes] = []
    peer = Wire(Pipe(lambda piece: said.append(bytes(piece)), bytes))
    peer.send(wire.MANIFEST, manifest)
    peer.send(wire.DIGESTS, pack_digests(b"\1" * (len(digests) // DIGEST_BYTES), digests))
    return {"run_id": run_id, "data": base64.b64encode(b"".join(said)).decode()}


def peer_of(talk: Conversation) -> Wire:
    """The node's end of the channel."""

    def send(piece: memoryview) -> None:
        talk.send({"data": base64.b64encode(piece).decode()})

    return Wire(Pipe(send, lambda: base64.b64decode(talk.take("data")["data"])))


def items(blocks: list[bytes], numbers: list[int]) -> Iterator[tuple[int, bytes, memoryview]]:
    for number in numbers:
        yield number, hashlib.sha256(blocks[number]).digest(), memoryview(blocks[number])


def copy(
    node: LocalNode, files: dict[str, bytes], links: dict[str, str] | None = None, run_id: str = "r1"
) -> list[str]:
    """Copy a tree; the names of the files of which something was sent."""
    blocks = blocks_of(files)
    with node.talk("code", ask(files, links, run_id)) as talk:
        peer = peer_of(talk)
        lacking = ask_lacking(peer, len(blocks))
        send_blocks(peer, items(blocks, lacking))
        assert tree(node, run_id).is_dir()
    names = [name for name, data in files.items() for _ in range(0, len(data), BLOCK_BYTES)]
    return list(dict.fromkeys(names[number] for number in lacking))


def tree(node: LocalNode, run_id: str = "r1") -> Path:
    return node.home / ".multinode" / "code" / run_id / "tree"


def left(node: LocalNode) -> list[str]:
    """What lies beside the store and the trees, and in the store without being whole."""
    root = node.home / ".multinode" / "code"
    return [path.name for folder in (root, root / ".store") for path in folder.glob(".*") if path.name != ".store"]


def test_the_tree_is_what_was_announced(node: LocalNode) -> None:
    assert copy(node, FILES, LINKS) == [name for name, data in FILES.items() if data]
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


def test_attempts_of_a_run_share_its_tree_and_other_code_is_refused_there(node: LocalNode, golden: Golden) -> None:
    copy(node, FILES)
    (tree(node) / "checkpoint").write_text("of the first attempt")
    assert copy(node, FILES) == []
    assert (tree(node) / "checkpoint").read_text() == "of the first attempt"
    said = node.error("code", ask({"train.py": b"2"})).replace(str(node.home), "HOME")
    golden.check("code_of_another_run.txt", said + "\n")


def test_no_path_and_no_link_leads_out_of_the_tree(node: LocalNode, golden: Golden) -> None:
    trees: list[tuple[list[str], dict[str, str]]] = [
        (["../x"], {}),
        (["/etc/x"], {}),
        (["a/../../x"], {}),
        (["a/./x"], {}),
        (["a//x"], {}),
        ([""], {}),
        (["a\0b"], {}),
        (["a", "a"], {}),
        (["a"], {"a": "b"}),
        (["a", "a/b"], {}),
        ([], {"l": "a", "l/x": "y"}),
        (["a/.x.multinode-copy"], {}),
        (["a"], {"../l": "a"}),
        (["a"], {"l": "/etc/passwd"}),
        (["a"], {"l": "../../x"}),
        (["a"], {"d/l": "../../x"}),
        # Through another link, though its own words stay inside.
        (["p/q/a"], {"p/q/top": "../..", "l": "p/q/top/../../x"}),
    ]
    told = ""
    for files, links in trees:
        entries: list[list[Any]] = [
            *(["f", path, 1, 0o600, None] for path in files),
            *(["l", *link] for link in links.items()),
        ]
        said = node.error("code", request(entries, [b"x"] * len(files)))
        told += f"# {json.dumps([files, links])}\n  {said}\n"
        outside = [path for path in node.home.rglob("*") if ".multinode" not in path.parts]
        assert (tree(node).exists(), left(node), outside) == (False, [], [])
    for run_id in ("../r", "", ".store", "a/b"):
        told += f"# run id {run_id!r}\n  {node.error('code', ask(FILES, run_id=run_id))}\n"
    golden.check("code_trees.txt", told)


def test_what_was_not_announced_is_not_kept(node: LocalNode, golden: Golden) -> None:
    train = FILES["train.py"]
    sent = {
        "other bytes": (0, train, b"other..."),
        "another digest": (0, b"other...", b"other..."),
        "more bytes": (0, train, b"print(1) and more"),
        "a block that was not requested": (9, train, train),
        "nothing": None,
    }
    told = ""
    for case, block in sent.items():
        with node.talk("code", ask(FILES)) as talk:
            peer = peer_of(talk)
            ask_lacking(peer, len(blocks_of(FILES)))
            if block is not None:
                number, digest, data = block
                peer.send(wire.BLOCK, struct.pack(">Q32s", number, hashlib.sha256(digest).digest()), data)
            peer.send(wire.DONE)
            told += f"# {case}\n  {talk.read_all()[-1]['message']}\n"
        assert (tree(node).exists(), left(node)) == (False, [])
        assert not list((node.home / ".multinode" / "code" / ".store").iterdir())
    for case, digests in (("more digests than blocks", [b"x", b"y"]), ("fewer", [])):
        told += f"# {case}\n  {node.error('code', request([['f', 'a', 1, 0o600, None]], digests))}\n"
    golden.check("code_blocks.txt", told)


def test_a_controller_that_goes_away_leaves_no_half_tree_and_what_came_is_not_sent_again(
    node: LocalNode, golden: Golden
) -> None:
    large = {**FILES, "large": bytes(BLOCK_BYTES) + b"end"}
    blocks = blocks_of(large)
    with node.talk("code", ask(large)) as talk:
        peer = peer_of(talk)
        lacking = ask_lacking(peer, len(blocks))
        assert lacking == [0, 1, 2, 3, 4]
        for number, digest, view in items(blocks, [0, 3]):
            peer.send(wire.BLOCK, struct.pack(">Q32s", number, digest), view)
        assert talk.hang_up() == 1
        golden.check("code_cut_off.txt", talk.records[-1]["message"] + "\n")
    assert (tree(node).exists(), left(node)) == (False, [])
    with node.talk("code", ask(large)) as talk:
        assert ask_lacking(peer_of(talk), len(blocks)) == [1, 2, 4]


def test_of_a_large_file_only_the_blocks_that_changed_are_sent_and_equal_ones_once(node: LocalNode) -> None:
    first = {"large": b"a" * BLOCK_BYTES * 2 + b"b" * BLOCK_BYTES}
    edited = {"large": first["large"] + b"c"}
    for run_id, files, sent in (("r1", first, [0, 2]), ("r2", edited, [3])):
        with node.talk("code", ask(files, run_id=run_id)) as talk:
            peer = peer_of(talk)
            lacking = ask_lacking(peer, len(blocks_of(files)))
            assert lacking == sent
            send_blocks(peer, items(blocks_of(files), lacking))
        assert (tree(node, run_id) / "large").read_bytes() == files["large"]


def test_what_is_damaged_in_the_store_is_sent_again(node: LocalNode) -> None:
    copy(node, FILES)
    (node.home / ".multinode" / "code" / ".store" / sha(FILES["train.py"])).write_bytes(b"print(2)")
    assert copy(node, FILES, run_id="r2") == ["train.py"]
    assert (tree(node, "r2") / "train.py").read_bytes() == b"print(1)"


def test_a_disk_without_room_is_said_before_anything_is_written(node: LocalNode) -> None:
    count = shutil.disk_usage(node.home).free // BLOCK_BYTES + 1000
    asked = request([["f", "a", count * BLOCK_BYTES, 0o600, None]], itertools.repeat(b"x", count))
    assert "MiB are free" in node.error("code", asked)
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
