"""How the nodes of a lab share this machine's GPUs: a GPU for each node, or one GPU by CUDA MPS, half of it each.

Without MPS the contexts of two processes on one GPU are time-sliced: each waits for the other, and no time is honest.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Self

CONTROL = "nvidia-cuda-mps-control"
_CONTROL_S = 60.0
# MPS keeps memory there that its daemon and its clients share.
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - not a file of ours


class Skipped(Exception):
    """A part of the report, or a row of it, cannot be run here; the text says why."""


class Sharing(NamedTuple):
    """What each node of a lab has of the GPUs."""

    words: str  # what computes, for the page
    gpus: tuple[int, ...] = ()  # the one GPU of each node, by node rank; empty: the nodes share one
    variables: Mapping[str, str] = MappingProxyType({})  # of every worker
    directories: tuple[str, ...] = ()  # which nodes have to see as they are here


class Mps:
    """A control daemon of MPS with directories of its own, which ends with the block.

    Raises:
        Skipped: the daemon does not start.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mps-")
        self._variables = {
            f"CUDA_MPS_{name}_DIRECTORY": str(Path(self._folder.name, name.lower())) for name in ("PIPE", "LOG")
        }

    def __enter__(self) -> Self:
        for directory in self._variables.values():
            Path(directory).mkdir()
        answer = self._run(["-d"])
        if answer is not None:
            self._folder.cleanup()
            raise Skipped(f"CUDA MPS does not start: {answer}")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Skipped):
            self.ask("quit")
        self._folder.cleanup()

    def sharing(self, nodes: int) -> Sharing:
        """An equal part of the GPU's multiprocessors for each node."""
        part = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // nodes)}
        return Sharing(
            words=f"{nodes} nodes share one GPU by CUDA MPS, {100 // nodes}% of its multiprocessors each",
            variables=self._variables | part,
            directories=(*self._variables.values(), _SHARED_MEMORY),
        )

    def ask(self, command: str) -> str:
        """What the daemon answers.

        Raises:
            Skipped: it does not answer.
        """
        try:
            done = subprocess.run(
                [CONTROL], input=f"{command}\n", env=os.environ | self._variables, capture_output=True, text=True,
                timeout=_CONTROL_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Skipped(f"CUDA MPS does not answer: {error}") from error
        return done.stdout

    def clients(self) -> list[str]:
        """The processes that have a context by MPS, by their ids."""
        return [
            client
            for server in self.ask("get_server_list").split()
            for client in self.ask(f"get_client_list {server}").split()
        ]

    def _run(self, words: Sequence[str]) -> str | None:
        """Why the control program did not do it; None if it did."""
        try:
            # The daemon keeps its standard streams, and a pipe would not end before it does.
            with tempfile.TemporaryFile("w+") as said:
                done = subprocess.run(
                    [CONTROL, *words], env=os.environ | self._variables, stdin=subprocess.DEVNULL, stdout=said,
                    stderr=said, timeout=_CONTROL_S, check=False,
                )  # fmt: skip
                said.seek(0)
                return None if done.returncode == 0 else " ".join(said.read().split())[:200] or f"{done.returncode}"
        except FileNotFoundError:
            return f"{CONTROL} is not here"
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)


def apart(nodes: int) -> Sharing:
    """A GPU for each node."""
    return Sharing(words=f"{nodes} nodes with a GPU of their own each", gpus=tuple(range(nodes)))


@contextlib.contextmanager
def shared(nodes: int, gpus: int, *, honest: bool) -> Iterator[tuple[Sharing, Mps | None]]:
    """How so many nodes share so many GPUs, and the daemon of MPS if they need one.

    Args:
        nodes: of the lab.
        gpus: of this machine; 0 rehearses.
        honest: whether times have to be those of nodes that do not wait for one another's computation. Otherwise nodes
            are time-sliced on one GPU.

    Raises:
        Skipped: times have to be honest, and MPS does not start.
    """
    if not gpus:
        yield Sharing(words="a sleeping host computes (rehearsal)", variables={"DS_ACCELERATOR": "cpu"}), None
    elif gpus >= nodes:
        yield apart(nodes), None
    elif not honest:
        yield Sharing(words=f"{nodes} nodes are time-sliced on one GPU"), None
    else:
        with Mps() as mps:
            yield mps.sharing(nodes), mps
