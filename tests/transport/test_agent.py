from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import pytest

from multinode.cluster.cluster import Node
from multinode.errors import ConnectError, ContactLost, MultinodeError, NodeFailed, printable
from multinode.transport.agent import AgentArchive, AgentStream, AgentTransport
from multinode.transport.base import Completed
from multinode.transport.fake import GREETING, FakeStream, FakeTransport
from tests.golden import Golden, error_of

NODE = Node(name="a")
ARCHIVE = AgentArchive(b"the agent")
VERB = f"python3 -I -S ~/{ARCHIVE.path} probe"
FACTS = b'{"kind":"facts","cores":2}\n'
MISSING = Completed(
    exit_code=2, stdout=b"", stderr=f"python3: can't open file '/root/{ARCHIVE.path}': [Errno 2] No such file".encode()
)

Answer = Completed | Iterable[bytes]


class Facts(msgspec.Struct, frozen=True, tag_field="kind", tag="facts"):
    """What the nodes here answer."""

    cores: int | None = None
    hostname: str | None = None
    env: dict[str, list[str]] | None = None


class Connected(msgspec.Struct, frozen=True, tag_field="kind", tag="connected"):
    """What comes of a further verb."""


def call(answer: Callable[[str], Answer]) -> tuple[Facts, FakeTransport]:
    fake = FakeTransport(lambda _node, command, _stdin: answer(command))
    return AgentTransport(fake, ARCHIVE).call(NODE, "probe", {"schema": 1}, Facts, deadline_s=5), fake


def failure(answer: Answer) -> MultinodeError:
    with pytest.raises(MultinodeError) as caught:
        call(lambda _: answer)
    assert caught.value.node == "a"
    return caught.value


def test_the_command_line_is_constant_and_the_request_is_one_line_on_stdin() -> None:
    request = {"python": "$(reboot); '\"\n", "env": {"A": "`x`"}}
    fake = FakeTransport(lambda *_: [FACTS])
    record = AgentTransport(fake, ARCHIVE).call(NODE, "probe", request, Facts, deadline_s=5)
    assert record == Facts(cores=2)
    ((node, command, stdin),) = fake.ran
    assert (node, command) == ("a", VERB)
    assert stdin.count(b"\n") == 1
    assert request.items() <= json.loads(stdin).items()


def test_an_agent_that_is_missing_is_sent_once_and_then_run() -> None:
    answers: Iterator[Answer] = iter([MISSING, Completed(exit_code=0, stdout=b"", stderr=b""), [FACTS]])
    record, fake = call(lambda _: next(answers))
    assert record.cores == 2
    assert [command for _, command, _ in fake.ran][::2] == [VERB, VERB]
    _, upload, stdin = fake.ran[1]
    assert stdin == ARCHIVE.data
    assert "umask 077" in upload
    assert f"~/{ARCHIVE.path}'" in upload


def test_why_a_node_runs_no_agent_is_said_and_it_is_not_asked_again(golden: Golden) -> None:
    sent = Completed(exit_code=0, stdout=b"", stderr=b"")
    full = Completed(exit_code=1, stdout=b"", stderr=b"sh: 1: cannot create: No space left on device\n")
    traceback = f'File "/root/{ARCHIVE.path}/multinode_agent/node/main.py", line 1: a defect'.encode()
    no_python = Completed(exit_code=127, stdout=b"", stderr=b"bash: python3: command not found\n")
    crashed = Completed(exit_code=1, stdout=b"", stderr=b"x" * 10_000 + b"\nSyntaxError: invalid syntax\n")
    cases: dict[str, tuple[Answer, ...]] = {
        "it stays missing": (MISSING, sent, MISSING),
        "it broke in our own code": (Completed(exit_code=1, stdout=b"", stderr=traceback),),
        "the home directory is full": (MISSING, full),
        "no python3": (no_python,),
        "it printed a lot": (crashed,),
        "it printed nothing": (sent, sent, sent),
    }

    def asked(answers: tuple[Answer, ...]) -> MultinodeError:
        left = iter(answers)
        return error_of(call, lambda _: next(left))

    golden.check_errors(
        "no_agent", {case: asked(answers) for case, answers in cases.items()}, shown={ARCHIVE.path: "AGENT"}
    )


class Shell(FakeStream):
    """A node whose shell prints these lines, and what comes of it; the agent is asked when it has begun."""

    def __init__(self, transport: FakeTransport, lines: list[bytes], ended: Completed) -> None:
        super().__init__(transport, NODE, VERB)
        self.lines = lines
        self.ended = ended

    def read_line(self, deadline_s: float) -> bytes | None:
        del deadline_s
        return self.lines.pop(0) if self.lines else None

    def finish(self, deadline_s: float) -> Completed:
        del deadline_s
        return self.ended


class ShellTransport(FakeTransport):
    """Opens streams to it."""

    def __init__(self, *lines: bytes, exit_code: int = 0, stderr: bytes = b"") -> None:
        super().__init__(lambda *_: Completed(exit_code=0, stdout=b"", stderr=b""))
        self.lines = [*lines]
        self.ended = Completed(exit_code=exit_code, stdout=b"", stderr=stderr)

    def open(self, node: Node, command: str, *, deadline_s: float) -> FakeStream:
        del node, command, deadline_s
        return Shell(self, [*self.lines], self.ended)


@pytest.mark.parametrize(
    "before",
    [
        [b"Welcome to node a!", b"", b"\x1b[1m*** quota 93%", b"\x1b]0;a\x07"],
        [b'{"motd": "hello"}', b"{ welcome }", b'{"kind": "agent"}', b'{"kind": "agent", "schema": 1, "python": "x"}'],
    ],
)
def test_what_a_bashrc_prints_first_is_passed_over_whatever_it_looks_like(before: list[bytes]) -> None:
    agent = AgentTransport(ShellTransport(*before, GREETING, FACTS), ARCHIVE)
    assert agent.call(NODE, "probe", {"schema": 1}, Facts, deadline_s=5).cores == 2


def test_what_a_node_printed_instead_of_an_answer_is_shown(golden: Golden) -> None:
    def answered(code: int) -> MultinodeError:
        transport = ShellTransport(b"Not today.", exit_code=code, stderr=b"no shim" if code == 127 else b"")
        agent = AgentTransport(transport, ARCHIVE)
        return error_of(agent.call, NODE, "probe", {"schema": 1}, Facts, deadline_s=5)

    golden.check_errors("no_answer", {f"exit code {code}": answered(code) for code in (0, 1, 127)})


def test_an_error_record_is_the_nodes_own_words_without_control_characters() -> None:
    error = failure([b'{"kind":"error","message":"no\\n\\u001b[31mworkdir","hint":"mkdir\\u0007 it"}\n'])
    assert isinstance(error, NodeFailed)
    assert (error.message, error.hint) == ("no  [31mworkdir", "a says: mkdir  it")


@pytest.mark.parametrize(
    "lie",
    [
        b"{not json\n",
        b'{"kind":\n',
        b"{\xff\xfe}\n",
        b'{"kind":"facts"}{"kind":"facts"}\n',
        b'{"kind":"facts","x":' + b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_not_a_record_is_the_nodes_failure_and_no_defect_of_ours(lie: bytes) -> None:
    error = failure([lie])
    assert isinstance(error, NodeFailed)
    assert "malformed response" in error.message
    assert error.message.isprintable()


@pytest.mark.parametrize(("rest", "error"), [((), ContactLost), ((FACTS,), NodeFailed)])
def test_a_record_that_a_lost_connection_cut_off_is_no_lie_of_the_node(
    rest: tuple[bytes, ...], error: type[Exception]
) -> None:
    fake = FakeTransport(lambda *_: [FACTS, b'{"kind":"facts","hostname":"4MTY5\n', *rest])
    stream = AgentTransport(fake, ARCHIVE).open(NODE, "follow", {"schema": 1}, Facts, deadline_s=5)
    with pytest.raises(error):
        stream.read(5)


class Kept(FakeStream):
    """A channel to an agent that goes on to a further verb, and what comes of asking for one."""

    def __init__(self, transport: FakeTransport, after: bytes | ContactLost | None) -> None:
        super().__init__(transport, NODE, VERB)
        self._answers: list[bytes | ContactLost | None] = [GREETING, FACTS, after]
        self.requests: list[dict[str, Any]] = []
        self.broken = False

    def send(self, data: bytes) -> None:
        if self.requests and self.broken:
            raise ContactLost("the connection was lost while sending", node=NODE.name)
        self.requests.append(json.loads(data))

    def read_line(self, deadline_s: float) -> bytes | None:
        del deadline_s
        answer = self._answers.pop(0) if self._answers else None
        if isinstance(answer, ContactLost):
            raise answer
        return answer


class KeepingTransport(FakeTransport):
    """Opens these channels, one after the other."""

    def __init__(self, *after: bytes | ContactLost | None) -> None:
        super().__init__(lambda *_: Completed(exit_code=0, stdout=b"", stderr=b""))
        self.channels = [Kept(self, each) for each in after]
        self.opened = 0

    def open(self, node: Node, command: str, *, deadline_s: float) -> FakeStream:
        del node, command, deadline_s
        self.opened += 1
        return self.channels[self.opened - 1]


def test_a_further_verb_takes_the_same_channel() -> None:
    transport = KeepingTransport(b'{"kind":"connected"}')
    agent = AgentTransport(transport, ARCHIVE)
    agent.call(NODE, "probe", {"schema": 1}, Facts, deadline_s=5)
    assert agent.open(NODE, "connect", {"schema": 1, "x": 2}, Connected, deadline_s=5).first == Connected()
    assert transport.opened == 1
    assert transport.channels[0].requests[1] == {"schema": 1, "x": 2, "verb": "connect"}


@pytest.mark.parametrize("broken", [False, True])
def test_an_agent_that_has_gone_meanwhile_or_cannot_be_told_is_started_again(broken: bool) -> None:  # noqa: FBT001 - a table
    transport = KeepingTransport(ContactLost("gone") if broken else None, None)
    transport.channels[0].broken = broken
    agent = AgentTransport(transport, ARCHIVE)
    agent.call(NODE, "probe", {"schema": 1}, Facts, deadline_s=5)
    assert agent.open(NODE, "probe", {"schema": 1}, Facts, deadline_s=5).first == Facts(cores=2)
    assert transport.opened == 2


def test_a_request_that_may_have_arrived_is_not_sent_twice() -> None:
    transport = KeepingTransport(ContactLost("silent"), None)
    agent = AgentTransport(transport, ARCHIVE)
    agent.call(NODE, "probe", {"schema": 1}, Facts, deadline_s=5)
    with pytest.raises(ContactLost):
        agent.open(NODE, "supervise", {"schema": 1}, Facts, deadline_s=5)
    assert transport.opened == 1


def test_the_interpreter_of_the_hostfile_runs_the_agent_and_python3_where_it_cannot() -> None:
    node = Node(name="a", python="/my env/bin/python")
    cannot = Completed(exit_code=126, stdout=b"", stderr=b"Permission denied\n")
    fake = FakeTransport(lambda _node, command, _stdin: cannot if "my env" in command else [FACTS])
    AgentTransport(fake, ARCHIVE).call(node, "probe", {"schema": 1}, Facts, deadline_s=5)
    assert [command for _, command, _ in fake.ran] == [f"'/my env/bin/python' -I -S ~/{ARCHIVE.path} probe", VERB]


def test_printable_keeps_letters_of_all_scripts_and_newlines() -> None:
    assert printable("a\u00e9\u6771\n\x1b[0m\r\x07") == "a\u00e9\u6771\n [0m  "


def test_what_a_node_says_carries_no_control_characters() -> None:
    fake = FakeTransport(
        lambda *_: [b'{"kind":"facts","hostname":"a\\u001b[2Jb","env":{"NCCL_\\u0007X":["\\u009b1m"]}}\n']
    )
    record = AgentTransport(fake, ARCHIVE).call(NODE, "probe", {}, Facts, deadline_s=5)
    assert record == Facts(hostname="a [2Jb", env={"NCCL_ X": [" 1m"]})


class FrozenStream(FakeStream):
    """A node that stands still: each end of it is waited for as long as may be, and `most` of them at a time."""

    waiting = most = 0

    def finish(self, deadline_s: float) -> Completed:
        FrozenStream.waiting += 1
        FrozenStream.most = max(FrozenStream.most, FrozenStream.waiting)
        time.sleep(0.2)
        FrozenStream.waiting -= 1
        raise ContactLost(f"it did not end within {deadline_s} s")


def test_agents_that_wait_for_a_further_verb_are_ended_at_once() -> None:
    fake = FakeTransport(lambda *_: [FACTS])
    agent = AgentTransport(fake, ARCHIVE)
    for number in range(4):
        node = Node(name=f"n{number}")
        agent.keep(node, AgentStream[Facts](FrozenStream(fake, node, "x"), node))
    agent.close()
    assert FrozenStream.most > 1


class RefusedStream(FakeStream):
    """A session that sshd refused, which says so when it is ended."""

    def finish(self, deadline_s: float) -> Completed:
        raise ConnectError(f"sshd refused another session (asked for within {deadline_s} s)")


def test_a_channel_is_let_go_of_however_its_agent_ends() -> None:
    fake = FakeTransport(lambda *_: [FACTS])
    agent = AgentTransport(fake, ARCHIVE)
    stream = RefusedStream(fake, NODE, "x")
    agent.keep(NODE, AgentStream(stream, NODE))
    agent.close()
    assert stream.is_closed


def test_a_channel_that_waited_with_an_old_python_is_let_go_of(golden: Golden) -> None:
    class Old(RefusedStream):
        def read_line(self, deadline_s: float) -> bytes:
            del deadline_s
            return GREETING.replace(b"3.9.0", b"3.8.1")

    fake = FakeTransport(lambda *_: [FACTS])
    agent = AgentTransport(fake, ARCHIVE)
    stream = Old(fake, NODE, "x")
    agent.keep(NODE, AgentStream(stream, NODE))
    old = error_of(agent.call, NODE, "probe", {"schema": 1}, Facts, deadline_s=5)
    golden.check_errors("old_python", {"Python 3.8": old})
    assert stream.is_closed


EARLY = f"python3 -I -S ~/{ARCHIVE.path}"


def test_an_agent_that_was_started_early_takes_the_first_verb() -> None:
    fake = FakeTransport(lambda *_: [FACTS])
    refreshed: list[bool] = []
    agent = AgentTransport(fake, ARCHIVE, refresh=lambda: refreshed.append(True))
    agent.start_early([NODE])
    agent.refresh()
    assert not refreshed
    assert agent.call(NODE, "probe", {"schema": 1}, Facts, deadline_s=5).cores == 2
    agent.refresh()
    assert refreshed == [True]
    ((_, command, stdin),) = fake.ran
    assert command == EARLY
    assert json.loads(stdin) == {"schema": 1, "then": True, "verb": "probe"}


def test_an_agent_that_was_missing_when_it_was_started_early_is_sent_at_the_first_verb() -> None:
    answers: Iterator[Answer] = iter([MISSING, MISSING, Completed(exit_code=0, stdout=b"", stderr=b""), [FACTS]])
    fake = FakeTransport(lambda *_: next(answers))
    agent = AgentTransport(fake, ARCHIVE)
    agent.start_early([NODE])
    assert agent.call(NODE, "probe", {"schema": 1}, Facts, deadline_s=5).cores == 2
    assert [command for _, command, _ in fake.ran if "cat >" not in command] == [EARLY, VERB, VERB]


class Unreachable(FakeTransport):
    """No node is, at first."""

    def __init__(self) -> None:
        super().__init__(lambda *_: [FACTS])
        self.tried = 0

    def open(self, node: Node, command: str, *, deadline_s: float) -> FakeStream:
        self.tried += 1
        if self.tried == 1:
            raise ConnectError("refused", node=node.name)
        return super().open(node, command, deadline_s=deadline_s)


def test_a_node_that_could_not_be_reached_early_is_told_at_the_first_use_and_tried_again_at_the_next() -> None:
    transport = Unreachable()
    agent = AgentTransport(transport, ARCHIVE)
    agent.start_early([NODE])
    with pytest.raises(ConnectError):
        agent.call(NODE, "probe", {"schema": 1}, Facts, deadline_s=5)
    assert transport.tried == 1
    assert agent.call(NODE, "probe", {"schema": 1}, Facts, deadline_s=5).cores == 2


def test_a_defect_while_an_agent_is_started_early_is_raised_at_the_first_use() -> None:
    class Defect(FakeTransport):
        def open(self, node: Node, command: str, *, deadline_s: float) -> FakeStream:
            raise ZeroDivisionError(node.name, command, deadline_s)

    agent = AgentTransport(Defect(lambda *_: [FACTS]))
    agent.start_early([NODE])
    with pytest.raises(ZeroDivisionError):
        agent.call(NODE, "probe", {"schema": 1}, Facts, deadline_s=5)
