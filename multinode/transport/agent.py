"""Talking to the agent on a node: one JSON request, JSON records in answer; the archive is sent if missing.

The archive is a zipapp of `node` and `worker`, reproducible byte for byte and named by its digest.
"""

from __future__ import annotations

import binascii
import contextlib
import functools
import hashlib
import importlib.util
import io
import logging
import secrets
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec

import multinode
from multinode.cluster.cluster import Node
from multinode.cluster.quoting import quote_path
from multinode.decoding import LineDecoder, decode_json
from multinode.errors import AgentFailed, ContactLost, MultinodeError, NodeError, NodeFailed, printable
from multinode.transport.base import Completed, Outcomes, Stream, Transport, fan_out, gather, time_left

_LOG = logging.getLogger(__name__)

Record = dict[str, Any]
_Kind = TypeVar("_Kind")

_PACKAGE = "multinode_agent"
_PARTS = ("node", "worker")
_NAME_DIGITS = 16
# The first lines run on any Python 3, to report one that is too old. A compiled copy beside the archive is preferred.
# Either is known to be complete: the copy ends with its digest (node/compiled.py), and the archive is named by its
# own.
_MAIN = f"""\
import hashlib, os, sys

if sys.version_info < (3, 9):
    print('\\n{{"kind": "agent", "schema": 1, "python": "%d.%d.%d"}}' % sys.version_info[:3])
    sys.exit(1)

def digest(data):
    return hashlib.sha256(data).hexdigest()

def read(path):
    with open(path, "rb") as file:
        return file.read()

def is_whole(copy):
    try:
        data = read(copy)
        if data[-64:] == digest(data[:-64]).encode():
            return True
        os.remove(copy)
    except OSError:
        pass
    return False

archive = sys.path[0]
stem = os.path.splitext(archive)[0]
copy = stem + "." + str(sys.implementation.cache_tag) + ".pyz"
name = os.path.basename(stem)
if is_whole(copy):
    sys.path[0] = copy
elif len(name) == {_NAME_DIGITS} and not digest(read(archive)).startswith(name):
    sys.exit(archive + " is damaged")

from {_PACKAGE}.node.main import main

main()
"""
# Zip needs a date; a constant keeps the digest a function of the content.
_EPOCH = (2000, 1, 1, 0, 0, 0)

_CANNOT_RUN = (126, 127)  # what a shell exits with when it cannot run, or find, a program
_NOT_FOUND = 127  # what a shell exits with when it cannot find python3
_OLDEST_PYTHON = (3, 9)
_SHOWN_BYTES = 400
_SHELL_WORD = b"multinode-ok"
# The answers with multi-line text: stacks, NCCL's RAS service, files of a plan.
_WITH_LINES = frozenset({"stack", "kernel_stack", "ras", "plan"})
# Verbs with longer answers: names of 100,000 files, a plan of many nodes, checkpoints.
_ANSWER_BYTES = 4 << 20
_LONG = {"fetch": 64 << 20, "runs": 16 << 20, "checkpoints": 16 << 20}
# Empty lists and objects take a hundred times the memory of their text. Each of ours has some text.
_BYTES_A_VALUE = 16
_END_DEADLINE_S = 2.0
_MOST_AT_ONCE = 32
# Shorter than that of any first verb: failures are reported before the verb's own timeout.
_EARLY_DEADLINE_S = 44.0


class Refused(msgspec.Struct, frozen=True, tag_field="kind", tag="error"):
    """The agent's record in place of any other: why it could not do what was asked."""

    message: str
    hint: str | None = None


class _Expected(Generic[_Kind]):
    """The records of a verb: one type, or a union of them, tagged by `kind`."""

    def __init__(self, verb: str, kind: type[_Kind]) -> None:
        self.most_bytes = _LONG.get(verb, _ANSWER_BYTES)
        self.noun = "facts" if verb == "probe" else "answer"
        self.decoder: LineDecoder[_Kind | Refused] = LineDecoder(kind | Refused, _WITH_LINES)  # type: ignore[arg-type]  # a union is no type


class _Greeting(msgspec.Struct, frozen=True):
    """The agent's first line; anything before it is from a shell."""

    schema: int
    python: Annotated[str, msgspec.Meta(pattern=r"^[0-9]+[.][0-9]+[.][0-9]+$")]


def require_kind(record: object, kind: type[_Kind], node: str) -> _Kind:
    """A record of a verb, where only this one of its kinds may come.

    Raises:
        NodeFailed: another came, or none.
    """
    if not isinstance(record, kind):
        raise NodeFailed(f"cannot read its answer: it has no {kind.__name__.strip('_').lower()}", node=node)
    return record


class AgentArchive:
    """The zipapp: its bytes, and its path on a node."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        # relative to the user's home directory; its name begins with its SHA-256
        self.path = f".multinode/agent/{hashlib.sha256(data).hexdigest()[:_NAME_DIGITS]}.pyz"


@functools.cache
def load_archive() -> AgentArchive:
    """The agent archive of this multinode, built once per process."""
    return AgentArchive(build_archive())


def build_archive() -> bytes:
    """Pack `node` and `worker` (and pynvml, one pure-Python module, if installed) into a zipapp.

    Files are stored uncompressed: a worker imports from it before zlib is available, and it is small.
    """
    source = Path(multinode.__file__).parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "__main__.py", _MAIN.encode())
        _add(archive, f"{_PACKAGE}/__init__.py", b"")
        for path in sorted(path for part in _PARTS for path in (source / part).rglob("*.py")):
            _add(archive, f"{_PACKAGE}/{path.relative_to(source).as_posix()}", path.read_bytes())
        pynvml = importlib.util.find_spec("pynvml")
        if pynvml is not None and pynvml.origin is not None:
            _add(archive, "pynvml.py", Path(pynvml.origin).read_bytes())
    return buffer.getvalue()


class AgentTransport:
    """Runs the agent's verbs on nodes.

    Args:
        transport: runs the commands.
        archive: the agent; default: that of this multinode.
        patience_s: if the agent has not started by then, test for as long again whether the shell runs anything.
        refresh: makes new files of this machine visible to agents that run already.
    """

    def __init__(
        self,
        transport: Transport,
        archive: AgentArchive | None = None,
        *,
        patience_s: float = 8.0,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        self._transport = transport
        self._patience_s = patience_s
        self._archive = archive or load_archive()
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], AgentStream[Any]] = {}
        self._early: dict[str, threading.Thread] = {}
        self._is_closed = False
        self._refresh = refresh
        self._has_asked = False
        self._failed: dict[str, Exception] = {}

    def start_early(self, nodes: Sequence[Node]) -> None:
        """Start the agent on these nodes in the background; errors are reported at first use.

        Hides the time of the login and of Python's start.
        """
        for node in nodes[: fan_out()]:
            thread = threading.Thread(target=self._start_early, args=(node,), name=f"start-{node.name}", daemon=True)
            self._early[node.name] = thread
            thread.start()

    def refresh(self) -> None:
        """Before nodes are asked anew: let them see files that were made here since."""
        if self._has_asked:
            self._refresh()

    def verifies(self, node: Node) -> bool:
        """Whether a node may receive a secret. See `Transport.verifies`."""
        return self._transport.verifies(node)

    def call(self, node: Node, verb: str, request: Record, kind: type[_Kind], *, deadline_s: float) -> _Kind:
        """Run a verb that answers with one record. Its channel is kept for the next verb, which saves a login.

        Args:
            node: the node.
            verb: of the agent.
            request: its arguments.
            kind: type of the record, tagged with its `kind`; other parts take no memory.
            deadline_s: total time.

        Raises:
            NodeError: the node is unreachable or did not answer in time.
            NodeFailed: the verb failed or answered something else, or the node cannot run the agent.
        """
        began = time.monotonic()
        stream = self._open(node, verb, request | {"then": True}, _Expected(verb, kind), deadline_s)
        _LOG.debug("%s: %s answered after %.2f s", node.name, verb, time.monotonic() - began)
        if stream.first is None:
            raise NodeFailed(f"the agent's {verb} gave no answer", node=node.name)
        self.keep(node, stream)
        return stream.first

    def call_all(
        self,
        nodes: Sequence[Node],
        verb: str,
        request: Record | Callable[[Node], Record],
        kind: type[_Kind],
        *,
        deadline_s: float,
    ) -> Outcomes[_Kind]:
        """Run a verb that answers with one record on several nodes at the same time.

        Args:
            nodes: the nodes.
            verb: of the agent.
            request: its arguments, or a function that makes them for a node.
            kind: type of the record, as for `call`.
            deadline_s: total time of each node.
        """

        def ask(node: Node) -> _Kind:
            asked = request(node) if callable(request) else request
            return self.call(node, verb, asked, kind, deadline_s=deadline_s)

        # A node that is late answers with its own error before this one gives up.
        return gather(nodes, ask, deadline_s=2 * deadline_s)

    def open(
        self, node: Node, verb: str, request: Record, kind: type[_Kind], *, deadline_s: float
    ) -> AgentStream[_Kind]:
        """Start a verb that keeps communicating, and wait for its first record; `kind` is the union of its records."""
        return self._open(node, verb, request, _Expected(verb, kind), deadline_s)

    def _open(
        self, node: Node, verb: str, request: Record, expected: _Expected[_Kind], deadline_s: float
    ) -> AgentStream[_Kind]:
        self._has_asked = True
        end = time.monotonic() + deadline_s
        early = self._early.pop(node.name, None)
        if early is not None:
            early.join(deadline_s)
        with self._lock:
            kept = self._kept.pop((node.name, self._transport.channel(verb)), None)
            failed = self._failed.pop(node.name, None)
        if failed is not None:
            raise failed
        if kept is not None:
            # The agent waits a minute for another verb; if it has ended, it is started again. A request that may have
            # arrived is not sent twice: it may have started a run.
            try:
                begun = self._greet(kept, node, end)
                if begun:
                    kept.send(request | {"verb": verb})
            except ContactLost:
                begun = False
            kept.expect(expected)
            if begun and kept.answer(time_left(end)) is None:
                return kept
            kept.close()
        return self._start(node, verb, request, expected, end)

    def keep(self, node: Node, stream: AgentStream[Any]) -> None:
        """Keep the channel of a finished verb that was asked with `then`, for the next verb."""
        with self._lock:
            before = self._kept.pop((node.name, stream.channel), None)
            if self._is_closed:
                before = stream
            else:
                self._kept[node.name, stream.channel] = stream
        if before is not None:
            before.close()

    def close(self, deadline_s: float = _END_DEADLINE_S) -> None:
        """End the agents that wait for another verb, including those being started."""
        with self._lock:
            self._is_closed = True
            kept = list(self._kept.values())
            self._kept.clear()
        if kept:
            # In parallel: each frozen one takes its whole deadline.
            with ThreadPoolExecutor(min(len(kept), _MOST_AT_ONCE), "end-agent") as pool:
                list(pool.map(lambda stream: _end(stream, deadline_s), kept))

    def _start_early(self, node: Node) -> None:
        try:
            command = f"{_pythons(node)[0]} -I -S ~/{self._archive.path}"
            opened = self._transport.open(node, command, deadline_s=_EARLY_DEADLINE_S)
            stream: AgentStream[Any] = AgentStream(opened, node)
        except Exception as error:  # noqa: BLE001 - a defect, too, is raised at the first use
            with self._lock:
                self._failed[node.name] = error
        else:
            self.keep(node, stream)

    def _start(
        self, node: Node, verb: str, request: Record, expected: _Expected[_Kind], end: float
    ) -> AgentStream[_Kind]:
        """Start the agent with the hostfile's interpreter or `python3`; send the archive if missing."""
        pythons = _pythons(node)
        sent = False
        while True:
            command = f"{pythons[0]} -I -S ~/{self._archive.path} {verb}"
            opened = self._transport.open(node, command, deadline_s=time_left(end))
            stream: AgentStream[_Kind] = AgentStream(opened, node, self._transport.channel(verb))
            stream.expect(expected)
            try:
                ended = None if self._greet(stream, node, end) else stream.finish(time_left(end))
                if ended is None:
                    stream.send(request)
            except BaseException:
                stream.close()
                raise
            if ended is None:
                ended = stream.answer(time_left(end))
                if ended is None:
                    return stream
            else:
                stream.close()
            if ended.exit_code in _CANNOT_RUN and len(pythons) > 1:
                pythons = pythons[1:]
            elif not sent and _is_not_whole(ended, self._archive):
                self._send_archive(node, time_left(end))
                sent = True
            else:
                raise _no_agent(node, verb, ended, stream)

    def _greet(self, stream: AgentStream[Any], node: Node, end: float) -> bool:
        """Wait until the agent has started, by `end` on the monotonic clock; False if its command ended before."""
        began = time.monotonic()
        soon = began + self._patience_s
        try:
            has_begun = stream.greet(time_left(min(soon, end)))
        except ContactLost:
            if time.monotonic() < soon:
                raise
        else:
            _LOG.debug("%s: waited %.2f s for the agent to begin", node.name, time.monotonic() - began)
            return has_begun
        if not self._shell_answers(node, end):
            stream.close()
            from multinode.transport import refusals

            raise refusals.SILENT.error(node, within_s=2 * self._patience_s, printed=_printed(stream.passed_over))
        return stream.greet(time_left(end))

    def _shell_answers(self, node: Node, end: float) -> bool:
        end = min(end, time.monotonic() + self._patience_s)
        try:
            stream = self._transport.open(node, f"echo {_SHELL_WORD.decode()}", deadline_s=time_left(end))
        except NodeError:
            return True
        try:
            while (line := stream.read_line(time_left(end))) is not None:
                if line.endswith(_SHELL_WORD):
                    return True
        except ContactLost:
            pass
        finally:
            stream.close()
        return False

    def _send_archive(self, node: Node, deadline_s: float) -> None:
        folder, name = self._archive.path.rsplit("/", 1)
        # Nodes and containers may share home directory, host name and process ids. A lost connection ends the input: a
        # partial archive must never be installed.
        new = f"~/{folder}/.{name}.{secrets.token_hex(8)}"
        # The content is on the disk before its name, and no copy outlives a damaged archive.
        script = (
            f'umask 077 && mkdir -p ~/{folder} && trap "rm -f {new}" EXIT && cat > {new} && '
            f"test $(wc -c < {new}) -eq {len(self._archive.data)} && chmod 700 {new} && "
            f'{{ dd if=/dev/null of="$HOME/{new[2:]}" conv=notrunc,fsync 2>/dev/null || sync; }} && '
            f"rm -f ~/{folder}/{name.removesuffix('.pyz')}.*.pyz && mv -f {new} ~/{folder}/{name}"
        )
        ended = self._transport.run(node, f"sh -c '{script}'", stdin=self._archive.data, deadline_s=deadline_s)
        if ended.exit_code != 0:
            from multinode.transport import refusals

            raise refusals.NOT_STORED.error(node, folder=folder, said=_said(ended.stderr))


class AgentStream(Generic[_Kind]):
    """A running verb on a node, and its records."""

    def __init__(self, stream: Stream, node: Node, channel: str = "") -> None:
        self.channel = channel  # the transport's name of it
        self._stream = stream
        self._node = node
        self.has_greeted = False  # whether the agent has started
        self.first: _Kind | None = None  # its first record, already read
        self._expected: _Expected[Any] = _Expected("", Refused)
        self.passed_over = b""  # the end of the output before the agent started

    def expect(self, expected: _Expected[_Kind]) -> None:
        """Expect these records next, which limits their length."""
        self._expected = expected
        self._stream.most_bytes = expected.most_bytes

    def greet(self, deadline_s: float) -> bool:
        """Wait until the agent has started; False if its command ended before.

        Lines before that are skipped: a .bashrc may print.

        Raises:
            ContactLost: it has not started within `deadline_s` seconds.
            NodeFailed: its interpreter is too old.
        """
        end = time.monotonic() + deadline_s
        while not self.has_greeted:
            line = self._stream.read_line(time_left(end))
            if line is None:
                return False
            version = _greeting(line)
            if version is None:
                self.passed_over = (self.passed_over + line + b"\n")[-_SHOWN_BYTES:]
            elif tuple(map(int, version.split(".")[:2])) < _OLDEST_PYTHON:
                self.close()
                from multinode.transport import refusals

                raise refusals.OLD_PYTHON.error(self._node, python=self._node.python or "python3", version=version)
            else:
                self.has_greeted = True
        return True

    def answer(self, deadline_s: float) -> Completed | None:
        """Wait for the first record in answer to what was sent; without one, report how the verb ended."""
        self.first = None
        try:
            self.first = self.read(deadline_s)
            return None if self.first is not None else self.finish(deadline_s)
        finally:
            if self.first is None:
                self.close()

    def send(self, request: Record) -> None:
        """Send one JSON line."""
        self._stream.send(msgspec.json.encode(request) + b"\n")

    def read(self, deadline_s: float) -> _Kind | None:
        """The next record; None at the end."""
        line = self._stream.read_line(deadline_s)
        return None if line is None else self._decode(line)

    def records(self, end: float) -> Iterator[_Kind]:
        """The first record and all that follow, until `end` on the monotonic clock."""
        if self.first is not None:
            yield self.first
        while (record := self.read(time_left(end))) is not None:
            yield record

    def close_stdin(self) -> None:
        """Signal the end of the input."""
        self._stream.close_stdin()

    def finish(self, deadline_s: float) -> Completed:
        """Signal the end of the input, and wait for the verb's end."""
        self._stream.close_stdin()
        return self._stream.finish(deadline_s)

    def close(self) -> None:
        """Release it."""
        self._stream.close()

    def _decode(self, line: bytes) -> _Kind:
        most, node = self._stream.most_bytes, self._node.name
        values = most // _BYTES_A_VALUE
        # Nearly all lines have fewer bytes than may be values, and are not counted.
        if len(line) > most or (len(line) > values and line.count(b"{") + line.count(b"[") > values):
            raise NodeFailed("its answer is too long", node=node)
        try:
            record = self._expected.decoder.decode(line)
        except (msgspec.ValidationError, binascii.Error) as error:
            raise NodeFailed(f"cannot read its {self._expected.noun}: {error}", node=node) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if self.first is not None and self._has_ended():
                raise ContactLost("the connection ended in the middle of a record", node=node) from error
            raise NodeFailed(f"malformed response: {_shown(line)}", node=node) from error
        if isinstance(record, Refused):
            # Advice from the node is marked as the node's.
            hint = f"{node} says: {record.hint}" if record.hint else None
            raise AgentFailed(record.message, node=node, hint=hint)
        kept: _Kind = record
        return kept

    def _has_ended(self) -> bool:
        try:
            return self._stream.read_line(0.0) is None
        except ContactLost:
            # No more input, but the connection stands.
            return False


def _end(stream: AgentStream[Any], deadline_s: float) -> None:
    # However it ends: a session that sshd rejected reports it only now.
    with contextlib.suppress(MultinodeError):
        stream.finish(deadline_s)
    stream.close()


def _is_not_whole(ended: Completed, archive: AgentArchive) -> bool:
    """Whether the stored agent is missing or incomplete."""
    is_ours = f"/{_PACKAGE}/".encode() in ended.stderr
    return ended.exit_code == 0 or (archive.path.encode() in ended.stderr and not is_ours)


def _pythons(node: Node) -> list[str]:
    return [quote_path(node.python), "python3"] if node.python is not None else ["python3"]


def _shown(data: bytes) -> str:
    return printable(data[-_SHOWN_BYTES:].decode(errors="replace").strip()).replace("\n", " | ")


def _said(data: bytes) -> str:
    return _shown(data) or "it printed nothing"


def _printed(data: bytes) -> str:
    return f": it printed {_shown(data)}" if _shown(data) else ""


def _greeting(line: bytes) -> str | None:
    if not line.startswith(b'{"kind": "agent"'):
        return None
    try:
        return decode_json(line, _Greeting).python
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _no_agent(node: Node, verb: str, ended: Completed, stream: AgentStream[Any]) -> MultinodeError:
    from multinode.transport import refusals

    printed = stream.passed_over + ended.stdout + ended.stderr
    if ended.exit_code == _NOT_FOUND:
        return refusals.NO_PYTHON.error(node, said=_said(ended.stderr))
    if stream.has_greeted and ended.exit_code == 0:
        return ContactLost(f"the agent's {verb} ended without an answer", node=node.name)
    if ended.exit_code == 0:
        return refusals.SWALLOWED.error(node, printed=_printed(printed))
    return refusals.AGENT_ENDED.error(node, verb=verb, code=ended.exit_code, said=_said(printed))


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, date_time=_EPOCH)
    info.external_attr = 0o600 << 16
    archive.writestr(info, data)
