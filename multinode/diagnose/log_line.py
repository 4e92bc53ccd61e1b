"""LogLine: who printed a line of a log, when, and as what; and the text without the marks in front of it. Pure.

One grammar serves torch, torchrun, torchx, accelerate, mpirun, srun, Ray, vLLM, SkyPilot, docker, pdsh, kubectl,
journald, glog and NCCL: a line is marks, in any order, and a text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import msgspec

from multinode.records.log import clean_log

_MOST_MARKS = 10


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line; None is what it does not say."""

    raw: str  # with its marks, as a terminal would show it
    text: str  # without them; a line of source code keeps its indentation
    rank: int | None = None  # the global rank that it names
    task: int | None = None  # the number of the task, as `srun --label` prints it: the rank where a task is a worker
    host: str | None = None
    worker: str | None = None  # the name of the actor or worker, as Ray and vLLM print it
    time: str | None = None
    level: str | None = None  # `E` for errors; `W` for warnings and whatever is less
    nccl: str | None = None  # the node, process and GPU that a line of NCCL names
    process: str | None = None  # names the process among those that write to this log
    is_nccl_warning: bool = False  # whether it is a warning of NCCL; early releases did not give its name

    @property
    def is_warning(self) -> bool:
        """Whether its logger calls it less than an error."""
        return self.level == "W"


_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_DATE = (
    rf"\d{{4}}[-/]\d\d[-/]\d\d[ T_-]{_CLOCK}(?:\.\d{{1,6}})?(?:Z|[+-]\d\d:?\d\d)?|\d\d/\d\d/\d{{4}} {_CLOCK}"
    rf"|\d{{4}}:\d\d:\d\d-{_CLOCK}:\(\d{{1,9}}\)|[A-Z][a-z]{{2}} [A-Z][a-z]{{2}} [ \d]\d {_CLOCK} \d{{4}}(?=\[)"
)
# Parts of a training, which are no nodes.
_PART = "(?:GPU|cuda|[Pp]roc(?:ess)?|[Ss]tep|[Ee]poch|[Ii]ter(?:ation)?|[Ss]tage|[Ff]old|[Tt]rial|[Tt]hread)"
_NAME = r"[\w.-]{1,64}"
# The marks. A group is named for what it tells, with a number where several marks tell it.
_MARKS = (
    # torch, Lightning, torchrun, glog
    r"\[rank(?P<rank1>\d{1,9})\]:?",
    r"\[(?:[Rr]ank|RANK):? ?(?P<rank9>\d{1,9})\]:?",
    r"[Rr]ank ?(?P<rank2>\d{1,9})(?:\[\d{1,9}\](?:\[\w{1,64}\])?)?:(?= )",
    rf"{_PART}[ _-]?\d{{1,9}}:(?= )",
    r"\[[a-z_]{1,32}(?P<local1>\d{1,9})\]:",
    r"\[PG (?:ID )?\d[^\]]{0,200}?\bRank (?P<rank8>\d{1,9})\]",
    rf"\[?(?P<level1>[EFWI]) ?(?:(?P<time1>\d{{3,4}} {_CLOCK})(?: \d{{1,9}})? )?[\w./-]{{1,200}}:\d{{1,6}}\]",
    # Open MPI, Horovod, torchrun's --tee, srun's --label; no time of day is one of these
    rf"(?P<time2>{_CLOCK})(?= )",
    r"\[\d{1,9},(?P<rank3>\d{1,9})\](?:<std(?:out|err|diag)>)?:",
    r"\[(?P<rank4>\d{1,9})\]<std(?:out|err)>:",
    r"\[(?P<local2>\d{1,9})\]:",
    r"(?P<task1>\d{1,9}):(?!\d)",
    # a progress bar, with nothing to end its line
    r"(?:[^%|\n]{0,60}: +)?\d{1,3}%\|[\u2580-\u259f#\d ]*(?:\| *\d[^\[|]{0,40}\[[^\]]{0,60}\])?",
    # Ray, vLLM
    (
        rf"\((?:(?P<worker1>{_NAME}?),? )?(?:rank=(?P<rank5>\d{{1,9}}),? )?pid=(?P<pid1>\d{{1,9}})"
        r"(?:, ip=(?P<node1>[\d.]{7,15}))?[^)]{0,80}\)"
    ),
    r"\((?:raylet|autoscaler|gcs_server)(?:, ip=(?P<host1>[\d.]{7,15}))?\)",
    rf"\[(?P<time3>{_DATE}) (?P<level2>[EFWIDC]) \d{{1,9}} \d{{1,9}}\](?: [\w./]{{1,100}}:\d{{1,6}}:)?",
    rf"(?P<level3>ERROR|CRITICAL) (?P<time4>(?:\d{{4}}-)?\d\d-\d\d {_CLOCK})(?: \[?[^\[\] ]{{1,100}}:\d{{1,6}}\])?",
    # NPUs
    r"\(PID:\d{1,9}, Device:-?\d{1,4}, RankID:(?P<rank6>-?\d{1,9})\)",
    # loguru
    r"\| (?P<level6>ERROR|CRITICAL) +\|(?: [\w.:<>-]{1,200} [-|](?= ))?",
    # containers and machines
    rf"\[pod/(?P<node2>{_NAME})/{_NAME}\]",
    r"std(?:out|err)(?: [FP](?= )|:(?= ))",
    r"<[a-z]{0,10}>(?= )",
    # quoted, as in a mail
    r">(?= )",
    rf"[A-Z][a-z]{{2}} [ \d]\d {_CLOCK} (?P<node3>{_NAME}) [\w./-]{{1,64}}\[\d{{1,9}}\]:",
    rf"slurmstepd-(?P<host2>{_NAME}):(?= )",
    rf"(?P<pipe1>{_NAME}) +\|\|?(?= |$)",
    r"\|(?= )",
    r"[A-Za-z][\w.-]{0,63}/\d{1,6}(?= )",
    rf"(?P<node4>{_NAME}):(?= )",
    # times and levels; SGLang names its worker there
    rf"\[(?P<time6>{_DATE})(?P<worker2>(?: (?:DP|PP|TP|EP)\d{{1,6}}){{1,4}})\]",
    rf"\[?(?P<time5>{_DATE})\]?:?",
    rf"\[(?P<level9>[EFWIDC]) (?P<time7>{_DATE})\]",
    r"\[\d{9,10}\.\d{3,9}\]",
    r"(?:\[[\w.:]{1,64}\])?\[(?P<level4>ERROR|CRITICAL|FATAL)\](?: *-)?",
    r"-? ?(?P<level5>ERROR|CRITICAL)(?: ?[-:])?(?= )",
    r"[a-z][\w.-]{1,63} +(?P<level8>ERROR|CRITICAL) +(?=[A-Z]\w*:)",
    # libfabric, UCX, NCCL
    r"libfabric:\d{1,9}:\d{1,12}::[\w:]{1,80}\(\):\d{1,6}<\w{1,10}>",
    rf"\[(?P<host3>{_NAME}):\d{{1,9}}(?: *:\d{{1,9}}){{0,2}}\]",
    r"[\w./]{1,100}:\d{1,6} +UCX +(?P<level7>[EFWID][A-Z]{3,4})\b",
    rf"(?P<host4>{_NAME}):rank(?P<rank7>\d{{1,9}})\.\w{{1,64}}:",
    r"[\w./]{1,200}:\d{1,6} (?P<warning1>NCCL WARN)\b",
    (
        rf"\[(?P<host6>{_NAME})\]\[\d{{1,9}}:\d{{1,9}}\]\[\d{{1,4}}\]\[[\w./]{{1,100}}:\d{{1,6}}\]"
        r" (?P<warning2>NCCL WARN)\b"
    ),
    (
        rf"(?P<host5>{_NAME}):(?P<nccl1>\d{{1,9}}):\d{{1,9}} \[(?P<gpu1>\d{{1,4}})\]"
        r"(?: [\w./]{1,200}:\d{1,6}(?: (?P<warning3>(?:NCCL )?WARN)\b)?| (?P<warning4>NCCL WARN)\b)?"
    ),
)
_MARK = re.compile(rf"\s*(?:{'|'.join(_MARKS)})\s?")
_RANK = re.compile(r"\b[Rr]ank (\d{1,9})\]|\(rank (\d{1,9}) in comm |(?<![\w-])rank=(\d{1,9}), pid=")
# Behind a date, NCCL's lines and those of `srun` name the node further on.
_HOST = re.compile(rf"(?:^|\s)({_NAME}):\d{{1,9}}:\d{{1,9}} \[\d{{1,4}}\] |(?:srun|slurmstepd): error: ({_NAME}): ")
_TIME = re.compile(rf"\d{{4}}-\d\d-\d\d[ T_]{_CLOCK}|(?<=[EFWI])\d{{4}} {_CLOCK}")
# What stands before a colon and is a node's name: with a figure or a hyphen, and no file and no error code of an NPU.
_NODE = re.compile(
    r"(?=[\w.-]*[\d-])(?!mlx\d|bnxt|efa|E[A-Z\d]\d{4}$)(?!.*\.(?:py|cc?|cpp|h|hpp|cu|sh|rs|go|so|log|json|ya?ml)$)(?!\w*\.\w*$(?<=\d))[A-Za-z\d][\w.-]*"
)
_NCCL_WARNING = "NCCL WARN "
_EXCEPTION = re.compile(
    r"(?:(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Timeout|Exit)|Exception)"
    # TensorFlow repeats one behind the stack of its operation.
    r"(?: \(see above for traceback\))?(?::(?: |$)|\s*$)"
)


def is_exception(text: str) -> bool:
    """Whether a text has the form of an exception, as Python prints it: `KeyError: 'x'`."""
    return _EXCEPTION.match(text) is not None


def is_bare_exception(text: str) -> bool:
    """Whether a text is the name of an exception alone: Python prints no message after it."""
    return re.fullmatch(r"(?:\w+\.)*[A-Z]\w*:?", text.strip()) is not None


# Where a frame of a traceback is: file, line and function.
FRAME_PLACE = re.compile(r"\s+File \"([^\"]{1,300})\", line (\d{1,9}),? in (\S{1,100})")
# What Python draws below source code, and how much of that is told.
_POINTERS, _MOST_SOURCE = re.compile(r"[\s~^]*"), 160


def source_line(frames: Iterable[str]) -> str | None:
    """The source code of the last frame of a traceback and where it is; None where the lines have no source code."""
    at, source = None, ""
    for line in frames:
        found = FRAME_PLACE.match(line)
        if found is not None:
            at, source = found, ""
        elif not _POINTERS.fullmatch(line):
            source = f"{source} {line.strip()}".lstrip()
    if at is None or not source:
        return None
    return f"{source[:_MOST_SOURCE]} (in {at[3]}, {at[1].rpartition('/')[2]}:{at[2]})"


def parse_line(raw: str) -> LogLine:
    """A line of a log, which `clean_log` has cleaned."""
    told: dict[str, str] = {}
    text = raw.rstrip()
    for _ in range(_MOST_MARKS):
        mark = None if _EXCEPTION.match(text.strip()) else _MARK.match(text)
        if mark is None or not mark.end():
            break
        named = {name[:-1]: value for name, value in mark.groupdict().items() if value}
        if "node" in named and mark["node4"] and not _NODE.fullmatch(mark["node4"]):
            break
        if "pipe" in named and _NODE.fullmatch(named["pipe"]):
            named.setdefault("node", named["pipe"])
        # A rank in brackets is that of a group, or of the launcher's; the outermost node is the machine.
        kept = ("node", "time", "rank") if "rank" in told and told.get("is_global") else ("node", "time")
        told = {**told, **named, **{name: told[name] for name in kept if name in told}}
        if mark["rank1"]:
            told["is_global"] = "yes"
        text = text[mark.end() :]
    return _line(raw, text, told)


def _line(raw: str, text: str, told: dict[str, str]) -> LogLine:
    rank = _int(told.get("rank"))
    if rank is None:
        found = _RANK.search(raw)
        rank = int(found[found.lastindex or 0]) if found is not None else None
    host = told.get("host") or told.get("node")
    if host is None and (further := _HOST.search(raw)) is not None:
        host = further[1] or (further[2] if _NODE.fullmatch(further[2]) else None)
    time = _TIME.search(raw if not is_exception(text) else raw.removesuffix(text))
    task = _int(told.get("task"))
    place = next(
        (f"{name} {told[name]}" for name in ("pid", "task", "local", "node") if name in told),
        None,
    )
    return LogLine(
        raw=raw,
        text=text,
        rank=rank,
        task=task,
        host=host,
        worker=told["worker"].strip() if "worker" in told else None,
        time=time[0] if time is not None else told.get("time"),
        level=_level(told.get("level")),
        nccl=f"{told['host']}:{told['nccl']} [{told['gpu']}]" if "nccl" in told else None,
        process=f"rank {rank}" if rank is not None else place,
        is_nccl_warning="warning" in told or _NCCL_WARNING in raw,
    )


def _int(number: str | None) -> int | None:
    return int(number) if number is not None and int(number) >= 0 else None


def _level(level: str | None) -> str | None:
    return None if level is None else "W" if level[0] in "WID" else "E"


# A paste from a terminal has this many lines at least that end at its width.
_LEAST_WRAPPED = 3
# No terminal is narrower.
_NARROWEST = 60


def unwrap(text: str) -> str:
    """A text that was pasted with the line ends of a terminal, with its lines joined; any other as it is.

    Lines of one same length are either filled with spaces up to the width of the terminal, and one that is not goes on
    in the next; or they end at the width, and each goes on. The number of lines stays: joined lines leave empty ones.
    """
    lines = text.split("\n")
    if len(lines) < 2 * _LEAST_WRAPPED:
        return text
    lengths = Counter(len(line) for line in lines if line.strip())
    padded = [line for line in lines if line.endswith("  ")]
    widest = max(lengths)
    if len(padded) * 3 >= len(lines) and len({len(line) for line in padded}) <= max(4, len(padded) // 2):
        goes_on = [bool(line) and not line.endswith("  ") for line in lines]
    elif (
        widest >= _NARROWEST
        and lengths[widest] >= max(_LEAST_WRAPPED, len(lines) // 10)
        and not _is_ruled(lines, widest)
    ):
        goes_on = [len(line) == widest for line in lines]
    else:
        return text
    joined: list[str] = []
    start = 0
    for number, line in enumerate(lines):
        if number and goes_on[number - 1] and line.strip():
            joined[start] += line.rstrip() if not goes_on[number] else line
            joined.append("")
        else:
            start = number
            joined.append(line if goes_on[number] else line.rstrip())
    return "\n".join(joined)


_RULE = re.compile(r"(\W)\1*")


def _is_ruled(lines: list[str], width: int) -> bool:
    """Whether lines of this width are rulers, tables or alike, which end there by themselves."""
    wide = [line for line in lines if len(line) == width]
    return len({re.sub(r"\d", "", line) for line in wide}) * 2 <= len(wide) or any(
        _RULE.fullmatch(line.strip()) is not None for line in wide
    )


def clean_line(piece: bytes, most: int) -> str:
    """The beginning of a line, as a terminal would show it."""
    return clean_log(piece[:most].decode(errors="replace"))
