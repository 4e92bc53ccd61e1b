from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.golden import Golden

from .localnode import PYTHON, LocalNode, parse_records


def ask(node: LocalNode, archive: str, request: bytes, *options: str) -> subprocess.CompletedProcess[bytes]:
    """The verb `probe`, asked so."""
    command = [*PYTHON, *options, archive, "probe"]
    return subprocess.run(command, input=request, env=node.env, capture_output=True, timeout=20, check=False)


def test_an_unknown_verb_is_told_with_the_known_ones(node: LocalNode) -> None:
    code, records = node.call("dance", {})
    assert code == 1
    assert records[0]["kind"] == "error"
    assert "dance" in records[0]["message"]
    assert "supervise" in records[0]["hint"]


@pytest.mark.parametrize("line", [b"no json\n", b"[1]\n", b"\n", b"", b'{"schema": 2}\n'])
def test_a_request_that_is_none_is_an_error_record(node: LocalNode, line: bytes, archive: str) -> None:
    ended = ask(node, archive, line)
    assert ended.returncode == 1
    assert ended.stderr == b""
    assert [record["kind"] for record in parse_records(ended.stdout.splitlines())] == ["error"]


def test_a_quick_verb_loads_little(node: LocalNode, archive: str) -> None:
    ended = ask(node, archive, b'{"schema": 1}\n', "-X", "importtime")
    loaded = {line.rpartition("|")[2].strip() for line in ended.stderr.decode().splitlines()}
    assert "multinode_agent.node.facts.network" in loaded
    # Each costs more than all of our own modules, or belongs to a verb that was not asked for.
    assert not loaded & {
        "asyncio",
        "dataclasses",
        "inspect",
        "logging",
        "argparse",
        "shutil",
        "multinode_agent.node.run.follow",
    }


def test_the_benchmark_is_a_worker_and_waits_for_no_request(node: LocalNode, archive: str) -> None:
    # Without torch it comes as far as the import: what matters is that stdin, held open, is not read first.
    with subprocess.Popen(
        [*PYTHON, archive, "collectives"], env=node.env, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as worker:
        assert worker.wait(20) == 1
        assert worker.stderr is not None
        assert b"No module named 'torch'" in worker.stderr.read()


def test_further_verbs_are_answered_on_the_same_channel(node: LocalNode, archive: str) -> None:
    requests = [
        {"schema": 1, "packages": False, "then": True},
        {"schema": 1, "verb": "probe", "packages": False, "then": True},
        {"schema": 1, "verb": "probe", "packages": False},
    ]
    ended = ask(node, archive, b"".join(json.dumps(request).encode() + b"\n" for request in requests))
    assert ended.returncode == 0
    assert [record["kind"] for record in parse_records(ended.stdout.splitlines())] == ["facts"] * 3


def test_a_channel_on_which_nothing_more_is_wanted_ends_well(node: LocalNode, archive: str) -> None:
    ended = ask(node, archive, b'{"schema": 1, "packages": false, "then": true}\n')
    assert (ended.returncode, len(list(parse_records(ended.stdout.splitlines())))) == (0, 1)


# The archive with less patience: nobody has to wait a minute to see it run out.
IMPATIENT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from multinode_agent.node import channel, main
channel._REQUEST_DEADLINE_S = 0.5
main.main()
"""


def test_a_channel_that_is_kept_too_long_ends_without_a_word(node: LocalNode, archive: str) -> None:
    # An error record would lie there, and be taken for the answer to the next verb.
    with subprocess.Popen(
        [*PYTHON, "-c", IMPATIENT, archive, "probe"], env=node.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        agent.stdin.write(b'{"schema": 1, "packages": false, "then": true}\n')
        agent.stdin.flush()
        # Stdin stays open: the controller may come back, and then starts anew.
        assert [record["kind"] for record in parse_records(agent.stdout)] == ["facts"]
        assert agent.wait(20) == 0


@pytest.mark.parametrize("folder", ["", "agent", "runs", "code"])
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o1777])
def test_a_home_that_others_may_write_is_refused(node: LocalNode, folder: str, mode: int) -> None:
    path = node.home / ".multinode" / folder
    path.mkdir(parents=True)
    path.chmod(mode)
    refused = mode & 0o002 != 0
    code, (record,) = node.call("runs", {"run_id": None})
    assert (code, record["kind"]) == ((1, "error") if refused else (0, "runs"))
    if refused:
        assert f"mode {mode:04o}" in record["message"]
        subprocess.run(["sh", "-c", str(record["hint"]).partition("then: ")[2]], check=True)
        assert node.call("runs", {"run_id": None})[0] == 0


def test_a_home_that_leads_elsewhere_counts_where_it_leads(node: LocalNode, tmp_path: Path, golden: Golden) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o700)
    (node.home / ".multinode").symlink_to(scratch)
    assert node.run(["true"]).records[-1]["exit_code"] == 0
    scratch.chmod(0o777)
    said = node.error("runs", {"run_id": None}).replace(str(scratch), "SCRATCH").replace(str(node.home), "HOME")
    said = said.replace(f"owned by user {scratch.owner()},", "owned by user USER,")
    golden.check("home_of_others.txt", said + "\n")


def test_no_thread_is_left_when_a_run_is_forked_after_a_probe(node: LocalNode) -> None:
    asked = {"packages": False, "contents": ["."], "datasets": [], "paths": ["."], "then": True}
    with node.talk("probe", asked) as talk:
        talk.take("facts")
        assert len(list(Path(f"/proc/{talk.process.pid}/task").iterdir())) == 1
        talk.send({"schema": 1, "verb": "supervise", **node.request(["true"])})
        assert talk.read_all()[-1]["exit_code"] == 0


def test_an_agent_in_the_background_leaves_the_cores_to_the_job(node: LocalNode, archive: str, tmp_path: Path) -> None:
    request = {"schema": 1, "directory": str(tmp_path), "cwd": None, "background": True, "then": True}
    command = [*PYTHON, archive, "checkpoints"]
    with subprocess.Popen(command, env=node.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        agent.stdin.write(json.dumps(request).encode() + b"\n")
        agent.stdin.flush()
        assert next(parse_records(agent.stdout))["kind"] == "checkpoints"
        assert os.getpriority(os.PRIO_PROCESS, agent.pid) == 19
