from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from multinode.core.cluster import Node
from multinode.errors import ContactLost, MultinodeError, NodeFailed
from multinode.transport.agent import AgentTransport, printable
from multinode.transport.archive import AgentArchive
from multinode.transport.base import Completed
from multinode.transport.fake import FakeTransport

NODE = Node(name="a")
ARCHIVE = AgentArchive(b"the agent")
VERB = f"python3 -I ~/{ARCHIVE.path} probe"
FACTS = b'{"kind":"facts","cores":2}\n'
MISSING = Completed(
    exit_code=2, stdout=b"", stderr=f"python3: can't open file '/root/{ARCHIVE.path}': [Errno 2] No such file".encode()
)

Answer = Completed | Iterable[bytes]


def call(answer: Callable[[str], Answer]) -> tuple[dict[str, Any], FakeTransport]:
    fake = FakeTransport(lambda _node, command, _stdin: answer(command))
    return AgentTransport(fake, ARCHIVE).call(NODE, "probe", {"schema": 1}, deadline_s=5), fake


def failure(answer: Answer) -> MultinodeError:
    with pytest.raises(MultinodeError) as caught:
        call(lambda _: answer)
    assert caught.value.node == "a"
    return caught.value


def test_the_command_line_is_constant_and_the_request_is_one_line_on_stdin() -> None:
    request = {"python": "$(reboot); '\"\n", "env": {"A": "`x`"}}
    fake = FakeTransport(lambda *_: [FACTS])
    record = AgentTransport(fake, ARCHIVE).call(NODE, "probe", request, deadline_s=5)
    assert record == {"kind": "facts", "cores": 2}
    ((node, command, stdin),) = fake.ran
    assert (node, command) == ("a", VERB)
    assert stdin.count(b"\n") == 1
    assert request.items() <= json.loads(stdin).items()


def test_an_agent_that_is_missing_is_sent_once_and_then_run() -> None:
    answers: Iterator[Answer] = iter([MISSING, Completed(exit_code=0, stdout=b"", stderr=b""), [FACTS]])
    record, fake = call(lambda _: next(answers))
    assert record["cores"] == 2
    assert [command for _, command, _ in fake.ran][::2] == [VERB, VERB]
    _, upload, stdin = fake.ran[1]
    assert stdin == ARCHIVE.data
    assert "umask 077" in upload
    assert f"mv -f ~/{ARCHIVE.path}.$$ ~/{ARCHIVE.path}" in upload


def test_an_agent_that_stays_missing_is_no_endless_loop() -> None:
    answers: Iterator[Answer] = iter([MISSING, Completed(exit_code=0, stdout=b"", stderr=b""), MISSING])
    with pytest.raises(NodeFailed, match="ended with code 2"):
        call(lambda _: next(answers))


def test_a_home_directory_that_cannot_be_written_says_so() -> None:
    full = Completed(exit_code=1, stdout=b"", stderr=b"sh: 1: cannot create: No space left on device\n")
    answers: Iterator[Answer] = iter([MISSING, full])
    with pytest.raises(NodeFailed, match=r"could not be stored in ~/.multinode/agent: .*No space left") as caught:
        call(lambda _: next(answers))
    assert "df -h" in str(caught.value.hint)


def test_what_a_bashrc_prints_first_is_passed_over() -> None:
    record, _ = call(lambda _: [b"Welcome to node a!\n", b"\n", b"\x1b[1m*** quota 93 %\n", FACTS])
    assert record["cores"] == 2


def test_an_error_record_is_the_nodes_own_words_without_control_characters() -> None:
    error = failure([b'{"kind":"error","message":"no \\u001b[31mworkdir","hint":"mkdir\\u0007 it"}\n'])
    assert isinstance(error, NodeFailed)
    assert (error.message, error.hint) == ("no  [31mworkdir", "mkdir  it")


def test_a_node_without_python3_is_told_what_to_install() -> None:
    error = failure(Completed(exit_code=127, stdout=b"", stderr=b"bash: python3: command not found\n"))
    assert "python3 is not on the PATH" in error.message
    assert "apt-get install python3" in str(error.hint)


def test_an_agent_that_crashed_shows_the_end_of_what_it_printed() -> None:
    stderr = b"x" * 10_000 + b"\nSyntaxError: invalid syntax\n"
    error = failure(Completed(exit_code=1, stdout=b"", stderr=stderr))
    assert "ended with code 1" in error.message
    assert error.message.endswith("SyntaxError: invalid syntax")
    assert len(error.message) < 500


def test_an_agent_that_went_without_a_word_is_lost() -> None:
    assert isinstance(failure(Completed(exit_code=0, stdout=b"", stderr=b"")), ContactLost)


@pytest.mark.parametrize(
    "lie",
    [
        b"{not json\n",
        b'{"kind":\n',
        b"{\xff\xfe}\n",
        b'{"kind":"facts"}{"kind":"facts"}\n',
        b'{"kind":' + b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_not_a_record_is_the_nodes_failure_and_no_defect_of_ours(lie: bytes) -> None:
    error = failure([lie])
    assert isinstance(error, NodeFailed)
    assert "it answered what is not a record" in error.message
    assert error.message.isprintable()


def test_printable_keeps_letters_of_all_scripts_and_newlines() -> None:
    assert printable("a\u00e9\u6771\n\x1b[0m\r\x07") == "a\u00e9\u6771\n [0m  "
