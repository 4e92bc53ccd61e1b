from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

from multinode.transport.agent import AgentArchive, build_archive, load_archive


def test_it_is_the_same_byte_for_byte_each_time_and_named_by_its_content() -> None:
    data = build_archive()
    assert data == build_archive()
    archive = AgentArchive(data)
    assert archive.digest == hashlib.sha256(data).hexdigest()[:16]
    assert archive.path == f".multinode/agent/{archive.digest}.pyz"
    assert AgentArchive(data + b"x").path != archive.path
    assert load_archive() is load_archive()


def test_it_holds_all_of_the_agent_uncompressed_and_nothing_else_of_ours() -> None:
    source = Path(__file__).parents[2] / "multinode" / "agent"
    expected = {f"multinode_agent/{path.relative_to(source)}" for path in source.rglob("*.py")}
    with zipfile.ZipFile(io.BytesIO(build_archive())) as archive:
        names = set(archive.namelist())
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
    assert names - {"pynvml.py"} == expected | {"__main__.py"}


def test_a_bare_interpreter_runs_it(tmp_path: Path) -> None:
    path = tmp_path / "agent.pyz"
    path.write_bytes(build_archive())
    command = [sys.executable, "-I", "-S", str(path), "no-such-verb"]
    ended = subprocess.run(command, input=b"{}\n", capture_output=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert json.loads(ended.stdout)["kind"] == "error"
    assert ended.stderr == b""
