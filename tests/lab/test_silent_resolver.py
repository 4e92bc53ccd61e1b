"""Name servers that do not answer: every verb that connects ends by its deadline, and names the node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.launching import DEADLINE_S

pytestmark = [pytest.mark.lab]

# glibc's resolver waits for 2.5 minutes by these, which are its limits.
RESOLV_CONF = "nameserver 127.0.0.1\noptions timeout:30 attempts:5\n"
# In namespaces of its own, beside a name server that takes every question and answers none.
SILENT = """
import socket, subprocess, sys
subprocess.run(["mount", "--bind", sys.argv[1], "/etc/resolv.conf"], check=True)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
server = socket.socket(type=socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
done = subprocess.run([sys.executable, "-m", "multinode", *sys.argv[2:]])
assert server.recv(512, socket.MSG_DONTWAIT), "nobody asked"
sys.exit(done.returncode)
"""


@pytest.mark.parametrize("verb", ["check", "launch --no-check"])
def test_a_name_that_is_not_resolved_in_time_is_an_error_that_names_the_node(verb: str, tmp_path: Path) -> None:
    files = {"resolv.conf": RESOLV_CONF, "hosts": "box.example slots=1\n", "train.py": ""}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    asked = [*verb.split(), "--hosts", "hosts", "--", "train.py"]
    done = subprocess.run(
        ["unshare", "--mount", "--net", sys.executable, "-c", SILENT, str(tmp_path / "resolv.conf"), *asked],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 3, said
    assert "box.example" in said
    assert "the name servers do not answer" in said
    assert "/etc/resolv.conf" in said
