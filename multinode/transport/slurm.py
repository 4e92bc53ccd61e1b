"""Slurm: each command is a step of a job that has the node, started by `srun --overlap` with the same stdin and stdout.

Steps that may start a run get the GPUs that the job has on the node; others get none. Slurm kills what a step leaves
behind when its first process ends, so the agent's stays as long as its run (multinode/agent/run/step.py).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import threading
from collections.abc import Mapping

from multinode.cluster.allocation import (
    Allocation,
    allocation_hostfile,
    parse_gpu_nodes,
    parse_job,
    parse_node_addresses,
)
from multinode.cluster.cluster import Cluster, Node
from multinode.errors import ConnectError, ContactLost, MultinodeError, NodeFailed, NodeGone, UsageError, printable
from multinode.transport.base import Transport
from multinode.transport.local import LocalStream, ask_program, start_piped

# What a verb begins with that ends in a run: only there has the step to show its GPUs.
_WITH_GPUS = frozenset({"probe", "connectivity", "supervise"})
_RUN, _CONTROL = "run", "control"
_QUERY_S = 20.0
_DEFAULT_KILL_WAIT_S = 30
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+)", re.MULTILINE)

# All that a step sees of the controller's environment; the rest may be secret, or of this machine alone.
_EXPORTED = "HOME LANG LC_ALL LC_CTYPE LD_LIBRARY_PATH LOGNAME PATH SHELL TZ USER"
_STEP = "--overlap --no-kill --input=0 --unbuffered --mpi=none --cpu-bind=none --mem=0 --nodes=1 --ntasks=1 --chdir=/"
_KILL_WAIT_VARIABLE = "MULTINODE_KILL_WAIT_S"
_DEVICES = "CUDA_VISIBLE_DEVICES"
# Options that salloc, sbatch or srun leave in the environment for the steps in it (INPUT ENVIRONMENT VARIABLES in
# srun's manual): a step of ours is asked for in words.
_OPTION_PREFIXES = ("SLURM_", "SRUN_", "SBATCH_", "SALLOC_")
_KEPT = frozenset({"SLURM_CONF"})
# A step has one task; a library that reads these would take its worker for the only one.
_LAYOUT = (
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_NPROCS SLURM_NNODES SLURM_TASKS_PER_NODE "
    "SLURM_STEP_NUM_TASKS SLURM_STEP_NUM_NODES SLURM_STEP_TASKS_PER_NODE SLURM_STEP_NODELIST"
)


_NEW = "make a new allocation: salloc, or multinode submit"
# What srun prints, in any case; what it means, `{job}` being the job; and what fixes it. The first that matches counts.
# src/common/slurm_errno.c of Slurm 22.05 to 24.11.
SLURM_REFUSALS: tuple[tuple[str, type[MultinodeError], str, str], ...] = (
    (
        "invalid job id|already complet|unable to confirm allocation|has expired|revoked",
        NodeGone,
        "Slurm job {job} has ended, and its nodes are no longer ours",
        _NEW,
    ),
    (
        "node configuration is not available|invalid node name|not in this job",
        NodeFailed,
        "Slurm job {job} does not have this node, or no longer",
        "see which it has, and their state: squeue --job {job}; sinfo -N -l",
    ),
    (
        "permission denied|invalid user|credential",
        NodeFailed,
        "Slurm does not let us start a step in job {job}",
        "it has to be a job of your own, and munge has to run on every node",
    ),
    ("step limit", NodeFailed, "Slurm job {job} may have no further steps (MaxStepCount)", _NEW),
    (
        "contact slurm controller|contacting slurm|connection refused|connection timed out",
        ConnectError,
        "slurmctld does not answer, so no step can be started",
        "see whether it runs: scontrol ping",
    ),
)


class SlurmTransport(Transport):
    """Runs commands on the nodes of Slurm jobs, each as a step of its own. `Node.slurm_job` says in which job.

    Args:
        client_end_s: so long srun has to end once a stream is closed; without it the step goes on until its run ends.
    """

    def __init__(self, *, client_end_s: float = 10.0) -> None:
        self._client_end_s = client_end_s
        self._lock = threading.Lock()
        self._allocations: dict[int, tuple[Allocation, frozenset[str]]] = {}
        self._kill_wait: int | None = None

    def channel(self, verb: str) -> str:
        """Verbs that lead to a run follow each other in a step with GPUs, all others in one without."""
        return _RUN if verb in _WITH_GPUS else _CONTROL

    def open(self, node: Node, command: str, *, deadline_s: float) -> SlurmStream:
        """Start a step and talk to its command. See `Transport.open`.

        Raises:
            NodeGone: the job has ended.
            UsageError: Slurm's programs are not here.
        """
        if node.slurm_job is None:
            raise UsageError("it has no slurm_job=", node=node.name)
        allocation, gpu_nodes, kill_wait_s = self._look_up(node.slurm_job)
        verb = command.rpartition(" ")[2]
        gres = allocation.resources.get(node.name) if self.channel(verb) == _RUN else None
        environment = step_environment(os.environ) | {_KILL_WAIT_VARIABLE: str(kill_wait_s)}
        if node.name in gpu_nodes and "gpu" not in (gres or ""):
            # Where Slurm does not hide what it did not give, somebody else may have it. It unsets what is exported.
            command = f"env {_DEVICES}= {command}"
        try:
            process = start_piped(step_command(node, gres, command, environment), environment)
        except OSError as error:
            raise _no_program("srun", error) from error
        stream = SlurmStream(process, node.name, send_deadline_s=deadline_s, job_id=node.slurm_job)
        stream.client_end_s = self._client_end_s
        return stream

    def close(self) -> None:
        """Nothing is kept open."""

    def _look_up(self, job_id: int) -> tuple[Allocation, frozenset[str], int]:
        """The job, those of its nodes whose GPUs Slurm gives out, and Slurm's KillWait in seconds."""
        with self._lock:
            if self._kill_wait is None:
                found = _KILL_WAIT.search(_ask("scontrol", "show", "config"))
                self._kill_wait = int(found[1]) if found else _DEFAULT_KILL_WAIT_S
            if job_id not in self._allocations:
                allocation = _read_job(job_id)
                named = allocation.node_list
                text = _ask("scontrol", "show", "node", "--oneliner", named) if named else ""
                self._allocations[job_id] = allocation, parse_gpu_nodes(text)
            return *self._allocations[job_id], self._kill_wait


class SlurmStream(LocalStream):
    """A step that is running, through its srun. See `Stream`.

    Args:
        process: srun, with pipes.
        node: the node's name, for messages.
        send_deadline_s: as of LocalStream.
        job_id: the job.
    """

    def __init__(self, process: subprocess.Popen[bytes], node: str, *, send_deadline_s: float, job_id: int) -> None:
        super().__init__(process, node, send_deadline_s=send_deadline_s)
        self._job_id = job_id

    def _wait(self, end: float) -> int:
        exit_code = super()._wait(end)
        if exit_code != 0:
            _raise_refusal(self._stderr.decode(errors="replace"), self._job_id, self._node)
        return exit_code


def step_command(node: Node, gres: str | None, command: str, environment: Mapping[str, str]) -> list[str]:
    """The argv of srun for one step on a node, and in it a constant command line.

    Args:
        node: where, and in which job.
        gres: generic resources that the step is given; None is none.
        command: for a shell, which begins in the home directory.
        environment: what the step sees of it goes by name.
    """
    exported = [name for name in (*_EXPORTED.split(), _KILL_WAIT_VARIABLE) if name in environment]
    return [
        *(
            "srun",
            *_STEP.split(),
            "--quiet",
            f"--jobid={node.slurm_job}",
            f"--gres={gres or 'none'}",
            f"--nodelist={node.name}",
        ),
        *(f"--export={','.join(exported)}", "sh", "-c", f"cd; unset {_LAYOUT}; exec {command}"),
    ]


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for srun itself: ours without the options that an allocation leaves in it."""
    return {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_OPTION_PREFIXES)}


def read_allocation(environ: Mapping[str, str]) -> tuple[Cluster, str] | None:
    """The nodes of the Slurm allocation that we are in, and a hostfile's text that says the same; None: we are in none.

    Raises:
        UsageError: it has ended, or Slurm's programs are not here.
        ConnectError: slurmctld does not answer.
    """
    job_id = environ.get("SLURM_JOB_ID", "")
    if not job_id.isdecimal():
        return None
    allocation = _read_job(int(job_id))
    if not allocation.holds_nodes:
        raise UsageError(f"Slurm job {job_id} is {allocation.state} and holds no nodes", hint=_NEW)
    named = environ.get("SLURM_JOB_NODELIST", "")
    addresses = parse_node_addresses(_ask("scontrol", "show", "node", "--oneliner", named)) if named else {}
    return allocation_hostfile(int(job_id), environ, allocation, addresses)


def submit_script(script: str, environ: Mapping[str, str]) -> int:
    """Submit a batch script; returns the job's id.

    Raises:
        UsageError: Slurm refuses it, or its programs are not here.
        MultinodeError: Slurm does not answer.
    """
    said = _ask("sbatch", "--parsable", stdin=script, environ=environ).split(";")[0].strip()
    if not said.isdecimal():
        raise MultinodeError(f"sbatch answered {said!r}, and no job id")
    return int(said)


def _read_job(job_id: int) -> Allocation:
    text = _ask("scontrol", "show", "job", "--details", str(job_id))
    try:
        return parse_job(text)
    except ValueError as error:
        raise UsageError(f"scontrol's answer about job {job_id} cannot be understood: {error}") from error


def _ask(*argv: str, stdin: str = "", environ: Mapping[str, str] | None = None) -> str:
    """What one of Slurm's programs prints.

    Raises:
        UsageError: it is not here.
        NodeFailed, NodeGone, ConnectError: as SLURM_REFUSALS has it.
        ContactLost: it did not answer in time.
        MultinodeError: it failed otherwise.
    """
    ran = shlex.join(argv)
    try:
        done = ask_program(argv, environ or step_environment(os.environ), stdin=stdin, deadline_s=_QUERY_S)
    except subprocess.TimeoutExpired as error:
        raise ContactLost(f"{argv[0]} did not answer within {_QUERY_S:.0f} s", ran=ran, hint="scontrol ping") from error
    except OSError as error:
        raise _no_program(argv[0], error) from error
    if done.returncode != 0:
        _raise_refusal(done.stderr, argv[-1], None)
        raise MultinodeError(f"{argv[0]}: {_last_line(done.stderr)}", ran=ran)
    return done.stdout


def _raise_refusal(stderr: str, job: object, node: str | None) -> None:
    """Raise what Slurm's own words mean; the output of the step's command means nothing here."""
    said = "\n".join(line for line in stderr.splitlines() if line.startswith(("srun: ", "slurm_", "scontrol: ")))
    for says, kind, message, hint in SLURM_REFUSALS:
        if re.search(says, said, re.IGNORECASE):
            raise kind(message.format(job=job), node=node, hint=hint.format(job=job), detail=said)
    if "Unable to create step" in said:
        raise ConnectError(f"no step could be started: {_last_line(said)}", node=node, detail=said)


def _last_line(text: str) -> str:
    lines = printable(text).strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def _no_program(name: str, error: OSError) -> UsageError:
    return UsageError(
        f"{name} cannot be run: {error.strerror}", hint="Slurm's programs are on login and compute nodes of its cluster"
    )
