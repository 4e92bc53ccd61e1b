"""What a broken node, or one that was taken over, answers: refused, whatever it is, in little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Asks an agent that prints what is named, and says what came of it and the most memory, in MiB, that it took.
ASK = """
import resource, sys
from multinode.cluster.cluster import Node
from multinode.check.probe import SentFacts
from multinode.errors import MultinodeError
from multinode.transport.agent import AgentTransport
from multinode.transport.local import LocalTransport

node = Node(name="a")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    AgentTransport(LocalTransport()).call(node, "probe", {"schema": 1}, SentFacts, deadline_s=60)
    said = "taken for facts"
except MultinodeError as error:
    said = str(error)
print(said.replace("\\n", " "))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
ANSWERS = {
    "60 MB of objects": "'{\"kind\":\"facts\",\"x\":[' + '{},' * 20_000_000 + '{}]}'",
    "4 MB of objects": "'{\"kind\":\"facts\",\"x\":[' + '{},' * 1_300_000 + '{}]}'",
    "4 MB of lists": "'{\"kind\":\"facts\",\"interfaces\":[' + '[],' * 1_300_000 + '[]]}'",
    "4 MB of numbers": "'{\"kind\":\"facts\",\"interfaces\":[' + '1.5,' * 1_000_000 + '1]}'",
    "a giant number": "'{\"kind\":\"facts\",\"time_s\":1' + '0' * 3_000_000 + '}'",
    "depth": "'{\"kind\":\"facts\",\"x\":' + '[' * 100_000 + ']' * 100_000 + '}'",
    "wrong types": '\'{"kind":[],"interfaces":7,"hostname":{"a":1},"time_s":"soon"}\'',
    "no object": "'[1, 2]'",
    "a line without end": '\'{"kind":"facts","x":"\' + \'x\' * 70_000_000',
}
AGENT = """#!{python}
import sys
sys.stdout.write('\\n{{"kind": "agent", "schema": 1, "python": "3.11.0"}}\\n')
sys.stdout.flush()
sys.stdin.readline()
sys.stdout.write({answer} + "\\n")
"""


@pytest.mark.parametrize("how", ANSWERS)
def test_an_answer_that_is_none_of_ours_is_refused_and_takes_little_memory(tmp_path: Path, how: str) -> None:
    agent = tmp_path / "python3"
    agent.write_text(AGENT.format(python=sys.executable, answer=ANSWERS[how]))
    agent.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True, timeout=600, check=True)
    said, mib = done.stdout.splitlines()
    assert said.startswith("a: "), said
    assert int(mib) < 200
