"""Slurm: each command is a step of a job on the node, started by `srun --overlap` with the same stdin and stdout.

Steps that may start a run get the job's GPUs on the node; others get none. Slurm kills the rest of a step when its
first process ends, so the agent's lives as long as its run (multinode/node/run/supervisor.py).
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
from multinode.errors import ConnectError, ContactLost, MultinodeError, UsageError, printable
from multinode.transport.base import Transport
from multinode.transport.local import LocalStream, ask_program, start_piped
from multinode.transport.refusals import NEW_ALLOCATION, SLURM_REFUSALS, find_refusal

# Prefix of the verbs that start a run: only their steps need GPUs.
_WITH_GPUS = frozenset({"probe", "connectivity", "supervise"})
_RUN, _CONTROL = "run", "control"
_QUERY_S = 20.0
_DEFAULT_KILL_WAIT_S = 30
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+)", re.MULTILINE)

# The variables that a step gets from the controller; others may be secret, or local to this machine.
_EXPORTED = "HOME LANG LC_ALL LC_CTYPE LD_LIBRARY_PATH LOGNAME PATH SHELL TZ USER"
_STEP = "--overlap --no-kill --input=0 --unbuffered --mpi=none --cpu-bind=none --mem=0 --nodes=1 --ntasks=1 --chdir=/"
_KILL_WAIT_VARIABLE = "MULTINODE_KILL_WAIT_S"
_DEVICES = "CUDA_VISIBLE_DEVICES"
# Options that salloc, sbatch or srun leave in the environment for steps (INPUT ENVIRONMENT VARIABLES in srun's manual):
# our steps set them explicitly.
_OPTION_PREFIXES = ("SLURM_", "SRUN_", "SBATCH_", "SALLOC_")
_KEPT = frozenset({"SLURM_CONF"})
# A step has one task; a library that reads these would assume a single worker.
_LAYOUT = (
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_NPROCS SLURM_NNODES SLURM_TASKS_PER_NODE "
    "SLURM_STEP_NUM_TASKS SLURM_STEP_NUM_NODES SLURM_STEP_TASKS_PER_NODE SLURM_STEP_NODELIST"
)


class SlurmTransport(Transport):
    """Runs commands on the nodes of Slurm jobs, each as a step. `Node.slurm_job` is the job.

    Args:
        client_end_s: how long srun may take to end after a stream is closed; otherwise the step continues until its
            run ends.
    """

    # A step needs to know its purpose, and each costs slurmctld work.
    starts_early = False

    @classmethod
    def why_no_detach(cls) -> UsageError:
        """A step ends with all of its processes."""
        return UsageError(
            "--detach does not work in an allocation: Slurm kills all processes of a job step when the step ends",
            hint="run the controller in a batch job: multinode submit -N2 -- launch ...",
        )

    def __init__(self, *, client_end_s: float = 10.0) -> None:
        self._client_end_s = client_end_s
        self._lock = threading.Lock()
        self._allocations: dict[int, tuple[Allocation, frozenset[str]]] = {}
        self._kill_wait: int | None = None

    def channel(self, verb: str) -> str:
        """Verbs that start a run share a step with GPUs, all others one without."""
        return _RUN if verb in _WITH_GPUS else _CONTROL

    def open(self, node: Node, command: str, *, deadline_s: float) -> SlurmStream:
        """Start a step and communicate with its command. See `Transport.open`.

        Raises:
            NodeGone: the job has ended.
            UsageError: Slurm's programs are not installed here.
        """
        if node.slurm_job is None:
            raise UsageError("it has no slurm_job=", node=node.name)
        allocation, gpu_nodes, kill_wait_s = self._look_up(node.slurm_job)
        verb = command.rpartition(" ")[2]
        gres = allocation.resources.get(node.name) if self.channel(verb) == _RUN else None
        environment = step_environment(os.environ) | {_KILL_WAIT_VARIABLE: str(kill_wait_s)}
        if node.name in gpu_nodes and "gpu" not in (gres or ""):
            # Devices that Slurm does not hide may belong to others. It unsets exported variables.
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
        with self._lock:
            if self._kill_wait is None:
                match = _KILL_WAIT.search(_ask("scontrol", "show", "config"))
                self._kill_wait = int(match[1]) if match else _DEFAULT_KILL_WAIT_S
            if job_id not in self._allocations:
                allocation = _read_job(job_id)
                named = allocation.node_list
                text = _ask("scontrol", "show", "node", "--oneliner", named) if named else ""
                self._allocations[job_id] = allocation, parse_gpu_nodes(text)
            return *self._allocations[job_id], self._kill_wait


TRANSPORT = SlurmTransport


class SlurmStream(LocalStream):
    """A running step, through its srun. See `Stream`.

    Args:
        process: srun, with pipes.
        node: the node's name, for messages.
        send_deadline_s: as for LocalStream.
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
    """The argv of srun for one step on a node that runs a constant command line.

    Args:
        node: the node, with its job.
        gres: generic resources of the step; None is none.
        command: for a shell, which starts in the home directory.
        environment: names of the variables that the step gets.
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
    """The environment for srun: ours without the options that an allocation leaves in it."""
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
        raise UsageError(f"Slurm job {job_id} is in state {allocation.state} and holds no nodes", hint=NEW_ALLOCATION)
    named = environ.get("SLURM_JOB_NODELIST", "")
    addresses = parse_node_addresses(_ask("scontrol", "show", "node", "--oneliner", named)) if named else {}
    return allocation_hostfile(int(job_id), environ, allocation, addresses)


def submit_script(script: str, environ: Mapping[str, str]) -> int:
    """Submit a batch script; returns the job id.

    Raises:
        UsageError: Slurm rejects it, or is not installed here.
        MultinodeError: Slurm does not answer.
    """
    answer = _ask("sbatch", "--parsable", stdin=script, environ=environ).split(";")[0].strip()
    if not answer.isdecimal():
        raise MultinodeError(f"sbatch printed {answer!r} instead of a job id")
    return int(answer)


def _read_job(job_id: int) -> Allocation:
    text = _ask("scontrol", "show", "job", "--details", str(job_id))
    try:
        return parse_job(text)
    except ValueError as error:
        raise UsageError(f"cannot parse scontrol's output about job {job_id}: {error}") from error


def _ask(*argv: str, stdin: str = "", environ: Mapping[str, str] | None = None) -> str:
    """The output of one of Slurm's programs."""
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
    words = "\n".join(line for line in stderr.splitlines() if line.startswith(("srun: ", "slurm_", "scontrol: ")))
    if (found := find_refusal(words, SLURM_REFUSALS)) is not None:
        refusal, values = found
        message, hint = refusal.worded({"job": job, **values})
        raise refusal.kind(message, node=node, hint=hint, detail=words)
    if "Unable to create step" in words:
        raise ConnectError(f"could not start a step: {_last_line(words)}", node=node, detail=words)


def _last_line(text: str) -> str:
    lines = printable(text).strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def _no_program(name: str, error: OSError) -> UsageError:
    return UsageError(
        f"{name} cannot be run: {error.strerror}", hint="run this on a login or compute node of the Slurm cluster"
    )
