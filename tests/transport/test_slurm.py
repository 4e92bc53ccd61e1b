"""The Slurm transport with stand-ins for Slurm's programs, which record how they are called."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multinode.check.probe import SentFacts
from multinode.cluster.cluster import Node
from multinode.errors import ContactLost, MultinodeError
from multinode.launch.node_runs import NodeRuns, clean
from multinode.transport.agent import AgentTransport
from multinode.transport.slurm import SlurmTransport, read_allocation, step_environment, submit_script
from tests import make
from tests.cluster.test_allocation import JOB, NODES
from tests.golden import Golden, error_of

DEADLINE_S = 20.0
NODE = Node(name="node0", slurm_job=7)
WITHOUT_GPUS = Node(name="node9", slurm_job=7)
# Runs what comes after its options here, with what --export names, in the directory that --chdir names.
SRUN = f"""#!{sys.executable} -IS
import json, os, sys
place = os.environ["RECORD"]
options = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1 + len(options):]
with open(place, "a") as file:
    file.write(json.dumps({{"options": options, "command": command, "env": dict(os.environ)}}) + "\\n")
named = dict(one.partition("=")[::2] for one in options)
os.chdir(named["--chdir"])
names = named["--export"].split(",")
env = {{name: os.environ[name] for name in names}} | {{"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}}
os.execvpe(command[0], command, env)
"""
SCONTROL = f"""#!/bin/sh
case "$*" in
  "show config") echo "KillWait                = 45 sec";;
  "show job"*) cat <<'END'
{JOB}END
;;
  "show node"*) cat <<'END'
{NODES}END
;;
esac
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the stand-ins; the user is in an allocation, and has a home directory of their own."""
    folder, home = tmp_path / "bin", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    put(folder, "srun", SRUN)
    put(folder, "scontrol", SCONTROL)
    for name, value in {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "HOME": str(home),
        "RECORD": str(tmp_path / "record"),
        "HF_TOKEN": "s3cret",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[0-2]",
        "SLURM_CONF": "/etc/other.conf",
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_MEM_PER_CPU": "100",
        "SRUN_CPUS_PER_TASK": "4",
        "SBATCH_PARTITION": "x",
    }.items():
        monkeypatch.setenv(name, value)
    return folder


def put(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def calls(programs: Path) -> list[dict[str, Any]]:
    """How srun was called, one call after the other."""
    return [json.loads(line) for line in (programs.parent / "record").read_text().splitlines()]


@pytest.fixture
def slurm(programs: Path) -> SlurmTransport:
    del programs
    return SlurmTransport(client_end_s=0.2)


@pytest.fixture
def agent(slurm: SlurmTransport) -> Iterator[AgentTransport]:
    transport = AgentTransport(slurm)
    yield transport
    transport.close()


def test_a_command_is_a_step_on_its_node_and_overlaps_all_others(slurm: SlurmTransport, programs: Path) -> None:
    told = slurm.run(NODE, "sh -c 'pwd; cat; exit 3'", stdin=b"word", deadline_s=DEADLINE_S)
    assert (told.exit_code, told.stdout.decode()) == (3, f"{os.environ['HOME']}\nword")
    (call,) = calls(programs)
    assert set(call["options"][:-1]) == {
        "--jobid=7",
        "--overlap",
        "--no-kill",
        "--input=0",
        "--unbuffered",
        "--mpi=none",
        "--cpu-bind=none",
        "--mem=0",
        "--gres=none",
        "--nodelist=node0",
        "--nodes=1",
        "--ntasks=1",
        "--chdir=/",
        "--quiet",
    }
    assert not any("s3cret" in word for word in [*call["options"], *call["command"]])


def test_a_step_sees_of_our_environment_what_is_listed_and_no_layout_of_its_own(
    slurm: SlurmTransport, programs: Path
) -> None:
    seen = slurm.run(NODE, "env", deadline_s=DEADLINE_S).stdout.decode().splitlines()
    names = {line.partition("=")[0] for line in seen}
    assert names >= {"PATH", "HOME", "SLURM_JOB_ID"}
    assert "MULTINODE_KILL_WAIT_S=45" in seen
    assert not names & {"HF_TOKEN", "RECORD", "SLURM_PROCID", "SLURM_GPUS_PER_TASK"}
    # srun itself reads its options from variables: none of the allocation's is among them.
    assert {name for name in calls(programs)[0]["env"] if name.startswith(("SLURM", "SRUN", "SBATCH"))} == {
        "SLURM_CONF"
    }
    assert step_environment({"SALLOC_X": "1", "SLURMD_X": "2"}) == {"SLURMD_X": "2"}


def test_gpus_that_slurm_gives_out_and_did_not_give_are_hidden(slurm: SlurmTransport, programs: Path) -> None:
    def devices(node: str, verb: str) -> str:
        command = "sh -c 'echo ${CUDA_VISIBLE_DEVICES-all}' " + verb
        return slurm.run(Node(name=node, slurm_job=7), command, deadline_s=DEADLINE_S).stdout.decode().strip()

    # The job has GPUs of node0 and none of node3's; node9's are none of Slurm's business.
    assert [devices(name, "probe") for name in ("node0", "node3", "node9")] == ["all", "", "all"]
    assert devices("node0", "stop") == ""
    del programs


def test_what_a_terminal_sends_does_not_reach_srun(slurm: SlurmTransport, programs: Path) -> None:
    told = slurm.run(NODE, "ps -o sid= -p $$", deadline_s=DEADLINE_S).stdout
    assert int(told) != os.getsid(0)
    del programs


def test_an_agent_is_sent_by_a_step_and_answers_in_one(agent: AgentTransport, programs: Path) -> None:
    assert agent.call(NODE, "probe", {"schema": 1}, SentFacts, deadline_s=DEADLINE_S).hostname
    assert [call["command"][-1].split()[-1] for call in calls(programs)][::2] == ["probe", "probe"]
    folder = Path(os.environ["HOME"]) / ".multinode/agent"
    assert [path.suffix for path in folder.iterdir()] == [".pyz"]


def test_verbs_of_a_run_follow_each_other_in_a_step_with_gpus_and_others_in_one_without(
    agent: AgentTransport, programs: Path
) -> None:
    agent.call(NODE, "probe", {"schema": 1}, SentFacts, deadline_s=DEADLINE_S)
    agent.call(NODE, "runs", {"schema": 1}, NodeRuns, deadline_s=DEADLINE_S)
    before = len(calls(programs))
    agent.call(NODE, "probe", {"schema": 1}, SentFacts, deadline_s=DEADLINE_S)
    clean(agent, make.cluster(NODE), [], 0.0)
    assert len(calls(programs)) == before
    agent.call(WITHOUT_GPUS, "probe", {"schema": 1}, SentFacts, deadline_s=DEADLINE_S)
    asked = [
        (call["command"][-1].split()[-1], next(o for o in call["options"] if "--gres" in o)) for call in calls(programs)
    ]
    assert asked[-3:] == [("probe", "--gres=gpu:a100:2"), ("runs", "--gres=none"), ("probe", "--gres=none")]


def test_why_srun_starts_no_step_is_said_in_words(agent: AgentTransport, programs: Path, golden: Golden) -> None:
    said = (
        "Unable to confirm allocation for job 7: Invalid job id specified",
        "Slurm job 7 has expired",
        "Unable to create step for job 7: Job/step already completing or completed",
        "Unable to create step for job 7: Requested node configuration is not available",
        "Unable to create step for job 7: Access/permission denied",
        "Unable to create step for job 7: Step limit reached for this job",
        "Unable to contact slurm controller (connect failure)",
        "Unable to create step for job 7: Something new",
    )

    def asked(words: str) -> MultinodeError:
        put(programs, "srun", f"#!/bin/sh\necho 'srun: error: {words}' >&2; exit 1\n")
        return error_of(agent.call, NODE, "probe", {"schema": 1}, SentFacts, deadline_s=DEADLINE_S)

    golden.check_errors("slurm_no_step", {words: asked(words) for words in said})


def test_what_a_command_says_is_no_word_of_slurms(slurm: SlurmTransport) -> None:
    told = slurm.run(NODE, "sh -c 'echo Permission denied, invalid job id >&2; exit 2'", deadline_s=DEADLINE_S)
    assert told.exit_code == 2


def test_a_srun_that_does_not_end_is_killed_by_what_it_cannot_hand_on(slurm: SlurmTransport, programs: Path) -> None:
    mark = programs.parent / "signalled"
    put(programs, "srun", f"#!/bin/sh\ntrap 'touch {mark}' TERM INT HUP\necho $$\nwhile :; do sleep 0.1; done\n")
    stream = slurm.open(NODE, "x", deadline_s=DEADLINE_S)
    pid = int(stream.read_line(DEADLINE_S) or 0)
    stream.close()
    end = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert not mark.exists()


def test_without_slurms_programs_it_says_where_they_are(
    slurm: SlurmTransport, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    slurm.run(NODE, "true", deadline_s=DEADLINE_S)
    monkeypatch.setenv("PATH", "/nowhere")
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node0"}
    errors = {
        "srun": error_of(slurm.open, NODE, "true", deadline_s=DEADLINE_S),
        "scontrol": error_of(read_allocation, allocation),
    }
    golden.check_errors("slurm_no_program", errors)


def test_a_step_that_says_nothing_is_lost_at_the_deadline(slurm: SlurmTransport, programs: Path) -> None:
    put(programs, "srun", "#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ContactLost):
        slurm.run(NODE, "true", deadline_s=0.3)


def test_the_allocation_that_we_are_in_is_a_cluster(programs: Path, golden: Golden) -> None:
    found = read_allocation(os.environ)
    assert found is not None
    cluster, text = found
    assert [(node.name, node.addr, node.slurm_job) for node in cluster.first(1).nodes] == [("node0", "10.213.1.1", 7)]
    assert text.startswith("# Slurm job 7\nnode0 ")
    assert read_allocation({}) is None
    put(programs, "scontrol", SCONTROL.replace("RUNNING", "TIMEOUT"))
    over = error_of(read_allocation, os.environ)
    put(programs, "scontrol", "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    gone = error_of(read_allocation, os.environ)
    golden.check_errors("slurm_no_allocation", {"its time is over": over, "it has ended": gone})


def test_a_script_is_submitted_on_stdin(programs: Path, golden: Golden) -> None:
    put(programs, "sbatch", f"#!/bin/sh\n[ \"$*\" = --parsable ] && cat > {programs}/script && echo '42;cluster'\n")
    assert submit_script("#!/bin/bash\n", os.environ) == 42
    assert (programs / "script").read_text() == "#!/bin/bash\n"
    put(
        programs,
        "sbatch",
        "#!/bin/sh\necho 'sbatch: error: Batch job submission failed: Invalid partition' >&2; exit 1\n",
    )
    refused = error_of(submit_script, "#!/bin/bash\n", os.environ)
    golden.check_errors("slurm_not_submitted", {"a partition that is not there": refused})
