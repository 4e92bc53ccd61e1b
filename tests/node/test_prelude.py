from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.golden import Golden

from .localnode import LocalNode

REPORT = "import json, os, sys\nprint(json.dumps([dict(os.environ), sys.argv[1:], os.getcwd()]))\n"


def run_to_end(node: LocalNode, argv: list[str], run_id: str = "r", **changes: Any) -> tuple[dict[str, Any], str]:
    """The last status, and the log."""
    talk = node.run(argv, run_id, **changes)
    return talk.records[-1], talk.data("log").decode()


def test_the_job_has_what_the_prelude_made_and_what_was_asked_for_wins(node: LocalNode) -> None:
    (node.home / "work").mkdir()
    (node.home / ".bash_profile").write_text("export FROM_PROFILE=yes RANK=7 PET_X=7\ncd /\n")
    tricky = "a 'b' \"c\"\n$(touch injected) `id`; echo \\"
    end, log = run_to_end(
        node,
        [*node.script(REPORT), tricky, "~not", "{run_dir}/x"],
        env={"MINE": tricky, "OTHER": "asked"},
        unset=["RANK", "PET_*"],
        cwd="~/work",
        path_first="~/bin",
        profile=True,
        ifnames=["lo", "eth0"],
        trace={"steps": 2},
        prelude="export OTHER=prelude THEIRS=prelude PATH=/theirs:$PATH PYTHONPATH=/theirs WAS=$OTHER; unset MINE",
    )
    assert (end["cause"], end["exit_code"]) == ("exited", 0), log
    env, arguments, cwd = json.loads(log)
    run_dir = str(node.run_dir())
    assert arguments == [tricky, "~not", f"{run_dir}/x"]
    assert cwd == str(node.home / "work")
    assert (env["MINE"], env["OTHER"], env["THEIRS"], env["WAS"]) == (tricky, "asked", "prelude", "asked")
    assert env["FROM_PROFILE"] == "yes"
    assert not {"RANK", "PET_X"} & set(env)
    assert env["PATH"].split(":")[:2] == [str(node.home / "bin"), "/theirs"]
    assert env["PYTHONPATH"].split(":")[0].endswith(".pyz/multinode_agent/worker/start")
    assert "/theirs" in env["PYTHONPATH"].split(":")
    assert (env["MULTINODE_RUN_ID"], env["MULTINODE_RUN_DIR"]) == ("r", run_dir)
    # What the instrumentation is told is as without a prelude.
    assert (env["MULTINODE_IFNAMES"], env["MULTINODE_TRACE"]) == ("lo,eth0", '{"steps": 2}')
    assert not list(node.home.rglob("injected"))


def test_what_a_prelude_and_its_job_are_handed_is_on_no_disk(node: LocalNode) -> None:
    _, log = run_to_end(node, ["true"], prelude="ls -l /proc/$$/fd", env={"TOKEN": "hf_secret"})
    assert "/memfd:" in log
    assert "(deleted)" not in log.replace("/memfd:multinode (deleted)", "")
    assert [path for path in node.run_dir().rglob("*") if path.is_file() and b"hf_secret" in path.read_bytes()] == []


def test_a_program_is_looked_for_after_the_prelude(node: LocalNode) -> None:
    (node.home / "hidden").mkdir()
    program = node.home / "hidden" / "trainer"
    program.write_text("#!/bin/sh\necho found\nexit 5\n")
    program.chmod(0o755)
    end, log = run_to_end(node, ["trainer"], prelude="PATH=~/hidden:$PATH")
    assert (end["cause"], end["exit_code"], log) == ("exited", 5, "found\n")


def test_the_jobs_files_and_signals_are_as_without_a_prelude(node: LocalNode) -> None:
    # Python itself ignores SIGPIPE, and what it starts would inherit that.
    shell = ["sh", "-c", "grep SigIgn /proc/self/status; umask; ls /proc/self/fd | wc -l; touch made"]
    (_, plain), (_, after) = (
        run_to_end(node, shell, f"r{number}", prelude=prelude) for number, prelude in enumerate(["", ":"])
    )
    assert plain == after
    assert "SigIgn:\t0000000000000000\n" in after
    assert (node.home / "made").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_prelude_that_fails_or_brings_no_program_is_named_and_the_job_is_not_started(
    node: LocalNode, golden: Golden
) -> None:
    program = node.home / "garbage"
    program.write_bytes(b"\x00garbage")
    program.chmod(0o755)
    touch = ["touch", "started"]
    cases = [
        ("source /no/such/activate", touch, "No such file"),
        ("false", touch, ""),
        ("exit 0", touch, ""),
        ("fi", touch, "syntax error"),
        ("kill -9 $$", touch, ""),
        ("true", ["no-such-program"], "no-such-program"),
        ("true", [str(program)], ""),
    ]
    told = ""
    for number, (prelude, argv, logged) in enumerate(cases):
        end, log = run_to_end(node, argv, f"r{number}", prelude=prelude)
        assert end["cause"] == "not_started"
        assert logged in log
        assert not (node.home / "started").exists()
        # A syntax error is 1 or 2, depending on bash's release.
        message = end["message"].replace("exit code 2,", "exit code 1,")
        told += f"# {prelude}; {' '.join(argv)}\n  {message}\n"
    golden.check("setup_fails.txt", re.sub(r"(?<=PATH is ).*", "...", told.replace(str(node.home), "HOME")))


def test_a_prelude_that_takes_its_time_can_be_stopped_with_all_that_it_started(node: LocalNode) -> None:
    with node.supervise(["true"], prelude="sleep 600 & echo waiting; sleep 600") as talk:
        talk.read_log_until(b"waiting")
        end = talk.stop()
    assert (end["cause"], end["processes_left"]) == ("stopped", 0)


def test_neither_the_prelude_nor_the_nodes_disk_sees_the_request(node: LocalNode) -> None:
    prelude = "cat <&9 || echo closed; unset TOKEN; env"
    end, log = run_to_end(node, ["true"], env={"TOKEN": "s3cret"}, prelude=prelude)
    assert end["exit_code"] == 0
    assert "closed" in log
    assert "s3cret" not in log
    for path in node.run_dir().rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path
    assert json.loads((node.run_dir() / "request.json").read_text())["env"] == {"TOKEN": None}


# Starts one job that reads what it was handed for each number of files that are open already.
_STARTS = """
import os, sys
from multinode.node.run.job import Job, start_job
for opened in range(12):
    job = Job("/bin/sh", ["sh", "-c", "cat <&9; echo"], {"PATH": "/bin"}, "/", sys.argv[1], 0o077, b"handed")
    os.waitpid(start_job(job), 0)
    os.open("/dev/null", os.O_RDONLY)
"""


def test_what_is_handed_arrives_whatever_files_the_supervisor_has_open(tmp_path: Path) -> None:
    log = tmp_path / "log"
    subprocess.run([sys.executable, "-c", _STARTS, str(log)], check=True, timeout=600)
    assert log.read_text() == "handed\n" * 12
