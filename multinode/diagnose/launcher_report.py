"""LauncherReport: what a launcher says about a worker that ended: its rank, node, exit code and signal. Pure.

Each launcher is one small grammar: the words that begin its report, the number of lines, and a pattern for each field.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from multinode.diagnose.log_line import LogLine, parse_line
from multinode.records.log import clean_log
from multinode.units import signal_name


class WorkerDeath(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that ended without a Python exception, as its launcher reports it."""

    rank: int | None = None  # global rank; None where the launcher does not say
    exit_code: int | None = None  # None where a signal ended it
    signal: str | None = None


class LauncherReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report of one worker's end; None is what it does not say."""

    launcher: str  # a key of `_GRAMMARS`
    death: WorkerDeath
    line: int  # where it begins, from 1
    host: str | None = None
    time: str | None = None
    worker: str | None = None  # which one, where it has a name and no rank: an actor, a task, a container
    text: str = ""  # its lines

    @property
    def is_of_job(self) -> bool:
        """Whether it may be of a job or step, whose workers have been reported before."""
        return self.launcher in {"Slurm", "shell", "command", "Determined"}

    @property
    def is_of_one_process(self) -> bool:
        """Whether it tells that a process ended, and not that the job failed by it: no failure after a training."""
        return self.launcher in {"shell", "raylet", "vLLM"}

    @property
    def ends_launcher(self) -> bool:
        """Whether a launcher that another program started has ended: what its workers did is in its own output."""
        return self.launcher == "command"


class _Grammar(msgspec.Struct, frozen=True, kw_only=True):
    begins: str
    form: re.Pattern[str] | None = None  # of another line that begins it
    lines: int = 1
    ruler: str = ""  # the character of which the line below it consists; empty without one
    # Of the fields `rank`, `local_rank`, `host`, `code`, `signal`, `worker`, `time` and `said`, the words that a worker
    # ended; `needs` one of these.
    fields: Mapping[str, re.Pattern[str]]
    needs: tuple[str, ...] = ("code", "signal")


def _grammar(
    begins: str, lines: int = 1, needs: tuple[str, ...] = ("code", "signal"), ruler: str = "", **fields: str
) -> _Grammar:
    patterns = {name: re.compile(pattern, re.MULTILINE) for name, pattern in fields.items()}
    return _Grammar(begins=begins, lines=lines, fields=patterns, needs=needs, ruler=ruler)


_SIGNAL_WORDS = {
    "Killed": 9,
    "Segmentation fault": 11,
    "Aborted": 6,
    "Bus error": 7,
    "Illegal instruction": 4,
    "Floating point exception": 8,
    "Terminated": 15,
}
_WORDS = "|".join(_SIGNAL_WORDS)
# What ended a program that a shell started, in its words. `Killed` is in the catalogue, and `Terminated` alone is also
# what it says of a helper that the script stops.
SHELL_WORDS = tuple(word for word in _SIGNAL_WORDS if word not in {"Killed", "Terminated"})
SHELLS_SIGNAL = re.compile(
    rf"(?:.{{0,200}}: line \d+:\s+\d+ (?:{'|'.join(SHELL_WORDS)})\b|(?:{'|'.join(SHELL_WORDS)})$)"
)
_NAME = r"[\w.-]{1,64}"
_TASK = rf"srun: error: {_NAME}: tasks? [\d,\[\]-]{{1,200}}: "
# By authority: what names the first worker that ended comes before what names any, and that before what names none.
_GRAMMARS: Mapping[str, _Grammar] = {
    "torchrun": _grammar(
        "Root Cause",
        16,
        ruler="=",
        rank=r"^\s*rank\s*:\s*(\d{1,6})\b",
        host=r"^\s*host\s*:\s*([\w.-]{1,64})\s*$",
        code=r"^\s*exitcode\s*:\s*(-?\d{1,6})\b",
        time=r"^\s*time\s*:\s*(\S{1,40})\s*$",
    ),
    "Open MPI": _grammar(
        "noticed that process rank ",
        2,
        rank=r"noticed that process rank (\d{1,6}) with PID",
        host=rf" on node ({_NAME}) exited",
        signal=r"exited on\s+signal (\d{1,3})",
    ),
    "first process": _grammar(
        "The first process to do so was",
        6,
        rank=r"Process name:\s*(?:\[(?:\[\d+,\d+\]|[\w.@-]{1,100}),(\d{1,6})\]|(\d{1,6})\s*$)",
        host=rf"Process name:\s*({_NAME})\[\d{{1,6}}\]",
        local_rank=rf"Process name:\s*{_NAME}\[(\d{{1,6}})\]",
        code=r"Exit code:\s*(-?\d{1,6})",
    ),
    "MPI_Abort": _grammar(
        "MPI_ABORT was invoked on rank ", 4, rank=r"invoked on rank (\d{1,6})", code=r"with errorcode (-?\d{1,6})"
    ),
    "MPICH": _grammar(
        "BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
        8,
        rank=r"\bRANK (\d{1,6}) PID",
        host=rf"RUNNING AT ({_NAME})",
        code=r"EXIT CODE: (-?\d{1,6})",
        signal=r"KILLED BY SIGNAL: (\d{1,3})|EXIT STRING: .{0,80}\(signal (\d{1,3})\)",
    ),
    "DeepSpeed": _grammar(
        "exits with return code = ",
        local_rank=r"'--local_rank=(\d{1,6})'",
        code=r"exits with return code = (-?\d{1,6})$",
        time=r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]?\d{0,9})\]",
    ),
    "Composer": _grammar(
        "crashed with exit code ", rank=r"\bRank (\d{1,6}) crashed", code=r"crashed with exit code (-?\d{1,6})"
    ),
    "Composer, later": _grammar(
        "Global rank ", rank=r"Global rank (\d{1,6}) \(PID \d+\) exited", code=r"exited with code (-?\d{1,6})"
    ),
    "Horovod": _grammar(
        " exit with status code ", rank=r"Process (\d{1,6}) exit with", code=r"exit with status code (-?\d{1,6})"
    ),
    "torch.multiprocessing": _grammar(
        " terminated with ",
        rank=r"\b[Pp]rocess (\d{1,6}) terminated with (?:signal|exit code|the following error)",
        code=r"[Pp]rocess \d{1,6} terminated with exit code (-?\d{1,6})",
        signal=r"[Pp]rocess \d{1,6} terminated with signal (SIG[A-Z0-9]{1,10})",
        needs=("code", "signal", "rank"),
    ),
    "signal handler": _grammar(
        "*** SIG", signal=r"\*\*\* (SIG[A-Z0-9]{1,10}) \(?.{0,40}?received|\*\*\* (SIG[A-Z0-9]{1,10}) received at time"
    ),
    "Ray": _grammar(
        "The actor died unexpectedly before finishing this task",
        9,
        worker=r"class_name: (?:[\w.<>]{0,200}\.)?(\w{1,100})",
        host=r"^\s*ip: ([\d.]{7,15})\s*$",
        needs=("worker",),
    ),
    "faulthandler": _grammar("Fatal Python error: ", signal=rf"Fatal Python error: ({_WORDS})\b"),
    "UCX": _grammar("Caught signal ", signal=r"Caught signal (\d{1,3}) \("),
    "Open MPI, signal": _grammar("*** Process received signal ***", 3, signal=r"Signal: [\w ]{1,40}\((\d{1,3})\)"),
    "Determined": _grammar("container failed with non-zero exit code", code=r"\(exit code (-?\d{1,6})\)"),
    # None of these says which global rank it is.
    "torchrun, agent": _grammar(
        "failed (exitcode: ",
        local_rank=r"local_rank: (\d{1,6}) \(pid: ",
        code=r"failed \(exitcode: (-?\d{1,6})\) local_rank: \d",
    ),
    # Of its report, what is left in a paste: those that did not fail first, and their ends.
    "torchrun, others": _grammar(
        "Failures:",
        8,
        host=r"^\s*host\s*:\s*([\w.-]{1,64})\s*$",
        code=r"^\s*exitcode\s*:\s*(-?\d{1,6})\b",
        time=r"^\s*time\s*:\s*(\S{1,40})\s*$",
    ),
    "torchrun, one": _grammar(
        "(local_rank: ",
        4,
        rank=r"^\s*rank\s*:\s*(\d{1,6}) \(local_rank: ",
        code=r"^\s*exitcode\s*:\s*(-?\d{1,6})\b",
    ),
    "torchrun, signal": _grammar(
        " received by PID ", signal=r"traceback\s*: Signal (\d{1,3}) \(SIG\w{1,10}\) received by PID"
    ),
    "accelerate": _grammar(
        "died with <Signals.", signal=r"CalledProcessError: .{0,4000} died with <Signals\.\w+: (\d+)>"
    ),
    "Slurm": _grammar(
        "srun: error: ",
        host=rf"srun: error: ({_NAME}): tasks? ",
        worker=rf"srun: error: {_NAME}: (tasks? [\d,\[\]-]{{1,200}}): ",
        code=rf"{_TASK}Exited with exit code (\d{{1,6}})",
        signal=rf"{_TASK}({_WORDS})\b",
        # What its memory did to it says the line itself.
        said=rf"{_TASK}(Out Of Memory)\b",
        needs=("code", "signal", "said"),
    ),
    "Slurm, launch": _grammar("srun: error: Task launch for ", host=rf" failed on node ({_NAME})", needs=("host",)),
    "Slurm, start": _grammar("slurmstepd: error: execve()", worker=r"execve\(\): (.{1,300})$", needs=("worker",)),
    "vLLM": _grammar(
        " died, exit code: ",
        worker=r"Worker (\w{1,64} pid \d{1,9}) died",
        code=r" died, exit code: (-?\d{1,6})",
    ),
    "raylet": _grammar(
        "A worker died or was killed while executing a task",
        host=r"Worker IP address: ([\d.]{7,15})",
        said=r"(A worker died or was killed)",
        needs=("said",),
    ),
    "shell": msgspec.structs.replace(
        _grammar(
            "(core dumped)",
            signal=rf"^(?:.{{0,200}}: line \d+:\s+\d+ )?({_WORDS})\s+\(core dumped\)"
            rf"|^.{{0,200}}: line \d+:\s+\d+ ({_WORDS})\b|^({_WORDS})$",
        ),
        form=SHELLS_SIGNAL,
    ),
    "command": _grammar(
        "returned non-zero exit status ",
        worker=r"CalledProcessError: Command '?\[?'?(?:[^\s',]{0,200}/)?([\w.-]{1,64})'?",
        node_rank=r"--(?:node|machine)_rank(?:', '|[= ])(\d{1,6})",
        code=r"CalledProcessError: .{0,4000} returned non-zero exit status (\d{1,6})",
    ),
}
# All that a line of a report may be told by.
BEGINNINGS = tuple(grammar.begins for grammar in _GRAMMARS.values())
# What DeepSpeed's launcher says of itself when it starts.
DEEPSPEED_PLACE = "num_local_procs="
# What Ray says of a node that was started with it.
ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - no server listens here
_PLACE = re.compile(r"nnodes=\d{1,6}, num_local_procs=(\d{1,6}), node_rank=(\d{1,6})\b")
_MOST_REPORTS = 400


class ReportReader:
    """Takes the lines of a log, and keeps the reports in them."""

    def __init__(self) -> None:
        self._open: list[tuple[str, int, LogLine, list[str]]] = []
        self._reports: list[LauncherReport] = []
        self._places: dict[str | None, tuple[int, int]] = {}

    @property
    def is_open(self) -> bool:
        """Whether the next lines may be of a report."""
        return bool(self._open)

    def __len__(self) -> int:
        return len(self._reports)

    def take(self, number: int, line: LogLine) -> bool:
        """Whether a line is of a report, and nothing else."""
        place = _PLACE.search(line.raw) if DEEPSPEED_PLACE in line.raw else None
        if place is not None:
            self._places[line.host] = int(place[1]), int(place[2])
        is_inside = self._continue(line)
        for launcher, grammar in _GRAMMARS.items():
            if grammar.begins in line.raw or (grammar.form is not None and grammar.form.match(line.text)):
                self._open.append((launcher, number, line, [line.raw if grammar.lines == 1 else line.text]))
                if grammar.lines == 1:
                    self._close(len(self._open) - 1)
        return is_inside or ("sigkill_handler" in line.raw and "received SIG" not in line.raw)

    def forget(self) -> None:
        """A new attempt begins: what failed before was not the end of the job."""
        self._open, self._reports = [], []

    def reports(self) -> tuple[LauncherReport, ...]:
        """All of them."""
        while self._open:
            self._close(0)
        return tuple(self._reports)

    def _continue(self, line: LogLine) -> bool:
        is_inside = False
        for place in reversed(range(len(self._open))):
            launcher, _, first, lines = self._open[place]
            if line.host != first.host and line.host is not None and first.host is not None:
                continue
            lines.append(line.text)
            is_inside = True
            # A worker under torch's `record` has its traceback in the report.
            ends = line.text.lstrip().startswith(("traceback :", "error_file:")) and "Traceback (" in line.text
            grammar = _GRAMMARS[launcher]
            is_ruled = grammar.ruler != "" and set(line.text.strip()) == {grammar.ruler}
            if ends or is_ruled or len(lines) >= grammar.lines:
                is_inside = not ends
                self._close(place)
        return is_inside

    def _close(self, place: int) -> None:
        launcher, number, first, lines = self._open.pop(place)
        report = _read(launcher, number, first, "\n".join(lines), self._places)
        if report is not None and len(self._reports) < _MOST_REPORTS:
            self._reports.append(report)


def _read(
    launcher: str, number: int, first: LogLine, text: str, places: Mapping[str | None, tuple[int, int]]
) -> LauncherReport | None:
    grammar = _GRAMMARS[launcher]
    found = {name: match for name, pattern in grammar.fields.items() if (match := pattern.search(text)) is not None}
    if not any(name in found for name in grammar.needs):
        return None
    told = {name: next(group for group in match.groups() if group is not None) for name, match in found.items()}
    rank = int(told["rank"]) if "rank" in told else first.rank
    local = int(told["local_rank"]) if "local_rank" in told else None
    workers, node_rank = places.get(first.host) or next(iter(places.values()), (0, 0))
    if rank is None and local is not None and workers:
        rank = workers * node_rank + local
    host = told.get("host") if told.get("host") != ANY_ADDRESS else None
    slot = f"{'slot' if launcher == 'first process' else 'local rank'} {local}"
    worker = told.get("worker") or first.worker or (slot if local is not None and rank is None else None)
    if "node_rank" in told:
        worker = f"{worker} of node rank {told['node_rank']}"
    return LauncherReport(
        launcher=launcher,
        death=_death(rank, told.get("code"), told.get("signal")),
        line=number,
        host=host or first.host,
        time=told.get("time") or first.time,
        worker=worker,
        text=text,
    )


def _death(rank: int | None, code: str | None, signal: str | None) -> WorkerDeath:
    if signal is not None:
        number = _SIGNAL_WORDS.get(signal)
        name = signal_name(number or int(signal)) if number or signal.isdigit() else signal
        return WorkerDeath(rank=rank, signal=name)
    if code is None:
        return WorkerDeath(rank=rank)
    if int(code) < 0:
        return WorkerDeath(rank=rank, signal=signal_name(-int(code)))
    return WorkerDeath(rank=rank, exit_code=int(code))


def first_report(reports: Sequence[LauncherReport]) -> LauncherReport | None:
    """The report of the worker that ended first; None without reports.

    The launcher with the most to say counts, and of several reports of it the earliest. TERM is what launchers send to
    the other workers themselves.
    """
    order = list(_GRAMMARS)

    def key(report: LauncherReport) -> tuple[bool, bool, int, str, int]:
        stopped = report.death.signal == "SIGTERM"
        rivals = [one for one in reports if one.launcher == report.launcher]
        has_times = all(one.time for one in rivals)
        return (
            report.ends_launcher,
            stopped,
            order.index(report.launcher),
            (report.time or "") if has_times else "",
            report.line,
        )

    best = min(reports, key=key, default=None)
    if best is None or (best.host is not None and best.death.signal is not None):
        return best
    # Ray tells the signal of an actor in one place, and its node in another.
    same = [one for one in reports if best.worker is not None and one.worker == best.worker]
    death, host = best.death, best.host
    if death.signal is None and death.exit_code is None:
        death = next((one.death for one in same if one.death.signal is not None), death)
    host = host or next((one.host for one in same if one.host is not None), None)
    return msgspec.structs.replace(best, death=death, host=host)


def find_worker_death(log: str) -> WorkerDeath | None:
    """The worker that a launcher's report names as the first to fail; None without a report."""
    report = first_report(read_reports(log.split("\n")))
    return report.death if report is not None else None


def read_reports(lines: Iterable[str]) -> tuple[LauncherReport, ...]:
    """The reports in the lines of a log."""
    reader = ReportReader()
    for number, line in enumerate(lines, 1):
        if reader.is_open or DEEPSPEED_PLACE in line or any(begins in line for begins in BEGINNINGS):
            reader.take(number, parse_line(clean_log(line)))
    return reader.reports()
