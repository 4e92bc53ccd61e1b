"""What figures of a failure mean: signals and exit codes, addresses, the status of a completion, a timeout. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from multinode.units import signal_name


class Meaning(msgspec.Struct, frozen=True, kw_only=True):
    """What an exit tells, and what to do next."""

    cause: str
    hint: str


_LOOK_ABOVE = (
    "read the log lines before the crash; to see the Python line, run once with PYTHONFAULTHANDLER=1; to see the "
    "native function, use a core dump: ulimit -c unlimited, then coredumpctl gdb"
)
# SIGBUS, SIGKILL, SIGINT and SIGHUP are in the catalogue.
_SIGNALS = {
    "SIGSEGV": Meaning(
        cause="Native code crashed: an extension, a library or a driver accessed invalid memory.",
        hint=_LOOK_ABOVE,
    ),
    "SIGABRT": Meaning(
        cause="The process aborted itself: the C++ runtime, glibc, a driver or NCCL's watchdog encountered an error.",
        hint=_LOOK_ABOVE,
    ),
    "SIGFPE": Meaning(cause="Native code divided an integer by zero.", hint=_LOOK_ABOVE),
    "SIGILL": Meaning(
        cause="A library uses instructions that this CPU does not have: it was built for another one.",
        hint="compare the CPUs of the nodes: lscpu; install a build for this CPU",
    ),
    "SIGTERM": Meaning(
        cause="The process was told to exit: by its launcher after another worker had failed, by a scheduler, or by a "
        "user.",
        hint="look for an earlier failure on the other nodes, and in the scheduler's log",
    ),
    "SIGUSR1": Meaning(
        cause="A scheduler warned the job, or a user sent the signal, and the program does not handle the signal.",
        hint="check the time limit of the job, and whether it was preempted",
    ),
}
_CODES = {
    126: Meaning(
        cause="The program exists but cannot be executed: it is not executable, or its file system is mounted noexec.",
        hint="run ls -l on the program, and findmnt -T on its path",
    ),
    127: Meaning(
        cause="The program, or a library that it needs to start, was not found on this node.",
        hint="name the interpreter of the training environment by its full path, or activate the environment first",
    ),
}
# A shell gives the signal that ended a program as a code above this.
MOST_CODE = 128


def signal_of_code(code: int | None) -> str | None:
    """The signal that an exit code stands for, as a shell gives it: 137 is SIGKILL."""
    return signal_name(code - MOST_CODE) if code is not None and MOST_CODE < code < MOST_CODE + 32 else None


def exit_meaning(exit_code: int | None, signal: str | None) -> Meaning | None:
    """What the end of a process means; None where it may mean anything."""
    return _SIGNALS.get(signal or signal_of_code(exit_code) or "") or _CODES.get(exit_code or 0)


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that NCCL's watchdog gave up."""

    group: str | None  # of ranks, in the words of the log; None where it does not say
    number: int  # among those of its group, from 1
    operation: str  # `ALLREDUCE`


_GROUP = re.compile(r"\[PG (?:ID )?(\d{1,9})\b|\[PG (?:ID \d{1,9} )?PG GUID ([^\s\]]{1,64})")
_WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\((?:SeqNum=(\d{1,15}),)?.{0,200}?"
    r"OpType=(\w{1,40}),.{0,400}?Timeout\(ms\)=(\d{1,15})"
)


def timed_out_collective(text: str) -> str | None:
    """What NCCL's watchdog waited for, as a sentence; None for any other line."""
    found = _WATCHDOG.search(text)
    if found is None:
        return None
    return f"the collective timed out: {found[2].lower()} took longer than {int(found[3]) / 1000:g} s"


def collective_of(line: str) -> Collective | None:
    """The collective that the line of a watchdog names with its number; None for any other line."""
    found = _WATCHDOG.search(line)
    if found is None or found[1] is None:
        return None
    group = _GROUP.search(line)
    return Collective(
        group=next(filter(None, group.groups()), None) if group is not None else None,
        number=int(found[1]),
        operation=found[2],
    )


_STUCK = re.compile(r"watchdog got stuck for (\d{1,9}) seconds")
_TAKEN = re.compile(r"wait timeout after (\d{1,12})ms|timed out after (\d{1,12})(?:\.\d+)? ?ms")
_STATUS = re.compile(r"[Gg]ot completion (?:from peer \S+ )?with (?:error |status=)(?:IBV_WC_\w+\()?(\d{1,3})\b")
# Of ibv_wc_status, in infiniband/verbs.h.
_COMPLETIONS = {
    4: "a buffer is not registered for this access (local protection error): look at GPUDirect RDMA and the driver",
    5: "it was flushed after an earlier error on the same queue pair: look for the first completion error",
    9: "the peer refused the request (remote invalid request)",
    10: "the peer's buffer is not registered for this access (remote access error)",
    11: "the peer could not complete it (remote operational error)",
    12: "the peer did not acknowledge it (transport retry counter exceeded): its process, the link or the path is down",
    13: "the peer had no buffer ready for it (receiver not ready)",
}
# Early releases of NCCL do not say why.
_VERBS = re.compile(r"Call to ibv_(?:create_cq|create_qp|reg_mr) failed\s*$")
_IPV4 = re.compile(r"(?<![\d.])(\d{1,3}\.\d{1,3})\.\d{1,3}\.\d{1,3}(?![\d.])")
_LINK_LOCAL_6 = re.compile(r"\bfe80::[\da-fA-F:]{1,39}(?:%([\w.-]{1,32}))?")


def notes(text: str) -> Iterator[str]:
    """What the figures and addresses in a message mean, each as a sentence."""
    sequence = _WATCHDOG.search(text)
    if sequence is not None and sequence[1] == "1":
        yield "It is the first collective of its group: a rank never joined, or the network never worked."
    stuck = _STUCK.search(text)
    if stuck is not None:
        yield f"It was stuck for {int(stuck[1])} s."
    waited = _TAKEN.search(text)
    if waited is not None:
        yield f"The limit was {int(waited[1] or waited[2]) / 1000:g} s."
    status = _STATUS.search(text)
    if status is not None and int(status[1]) in _COMPLETIONS:
        yield f"Completion status {int(status[1])}: {_COMPLETIONS[int(status[1])]}."
    if _VERBS.search(text) is not None:
        yield (
            "Most often, the limit on locked memory is too low: RDMA needs locked memory for its buffers. Raise the "
            "limit: ulimit -l unlimited, or docker run --ulimit memlock=-1."
        )
    yield from address_notes(text)


def address_notes(text: str) -> Iterator[str]:
    """What is wrong with addresses that no other node can reach."""
    local = _LINK_LOCAL_6.search(text)
    if local is not None:
        of = f" of {local[1]}" if local[1] else ""
        yield (
            f"{local[0]} is an IPv6 link-local address{of}: the interface has no other address. Give it an IPv4 "
            "address, or name another interface: NCCL_SOCKET_IFNAME."
        )
    for found in _IPV4.finditer(text):
        if found[1] == "169.254":
            yield f"{found[0]} is a link-local address: the interface got no address from DHCP; name another interface."
        elif found[1] == "172.17":
            yield (
                f"{found[0]} is an address of docker's bridge, which other machines cannot reach: start the container "
                "with --network=host."
            )
        else:
            continue
        return


def is_unreachable(address: str) -> bool:
    """Whether no other node can reach an address."""
    return next(address_notes(address), None) is not None
