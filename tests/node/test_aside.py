from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from multinode.cluster.facts import NO_ANSWER, NodeFacts
from multinode.decoding import convert
from multinode.node.facts.aside import Aside, LateError, Readings
from multinode.stats.unknown import entries, or_empty, or_none, reason_of
from tests.golden import Golden, raised

from .localnode import LocalNode

HUNG = Path(__file__).with_name("hung.py")


def after(seconds: float) -> float:
    return time.monotonic() + seconds


def hang() -> Any:
    time.sleep(600)


def fail() -> Any:
    raise FileNotFoundError("no such file")


def test_what_is_read_aside_comes_in_order() -> None:
    assert list(Aside(lambda: [1, {"a": None}, "b"]).values(after(20))) == [1, {"a": None}, "b"]


def test_what_was_read_in_time_counts_and_the_rest_is_given_up() -> None:
    assert list(Aside(lambda: (hang() if number == 2 else number for number in range(4))).values(after(1))) == [0, 1]


def test_an_answer_that_lay_ready_counts_whenever_it_is_asked_for() -> None:
    aside = Aside(lambda: ["x" * 200_000])
    assert [len(value) for value in aside.values(after(20))] == [200_000]


def test_each_reading_has_its_outcome_and_one_that_hangs_holds_up_no_other() -> None:
    readings = Readings()
    found: dict[str, int] = {}
    readings.add("first", lambda: found.setdefault("first", 1))
    # What an earlier one has put there, a later one finds.
    readings.add("second", lambda: found["first"] + 1)
    readings.add("broken", fail)
    for name in ("hangs", "hangs too"):
        readings.add(name, hang, 0.2)
    readings.add("last", lambda: 3)
    readings.start()
    assert (readings.take("second"), readings.take("last"), readings.take("first")) == (2, 3, 1)
    assert str(raised(ValueError, readings.take, "broken")) == "no such file"
    for name in ("hangs", "hangs too"):
        with pytest.raises(LateError):
            readings.take(name)
    readings.close()


def test_the_controllers_channel_ends_though_a_reading_goes_on() -> None:
    script = "import time\nfrom multinode.node.facts.aside import Aside\nAside(lambda: [time.sleep(20)], 30)\n"
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=600, check=True)
    assert time.monotonic() - began < 15


def _facts(output: bytes) -> NodeFacts:
    return convert(json.loads(next(line for line in output.splitlines() if b'"facts"' in line)), NodeFacts)


def probe_beside_hung(node: LocalNode, place: Path, **request: Any) -> NodeFacts:
    """What a probe tells while nothing below `place` answers."""
    place.mkdir()
    command = ["unshare", "--mount", sys.executable, str(HUNG), str(place), *node.command, "probe"]
    if os.geteuid() != 0:
        command[1:1] = ["--user", "--map-root-user"]
    line = json.dumps({"schema": 1, "packages": False, **request}) + "\n"
    done = subprocess.run(command, input=line.encode(), capture_output=True, env=node.env, timeout=600, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return _facts(done.stdout)


def test_a_file_system_that_hangs_costs_its_own_facts_only(node: LocalNode, tmp_path: Path) -> None:
    place = tmp_path / "data"
    (node.home / "train.py").write_text("print()")
    hung = str(place / "model")
    paths = [hung, "train.py"]
    facts = probe_beside_hung(node, place, workdir=str(node.home), paths=paths, contents=paths)
    assert [(one.path, one.place, one.device) for one in facts.hung_paths] == [(hung, str(place), "store:/data")]
    assert [(one.path, one.kind) for one in facts.paths] == [("train.py", "file")]
    assert {one.path: reason_of(one.digest) for one in facts.contents}[hung] == "not read within 5 s"
    assert (facts.cwd, bool(or_none(facts.python)), bool(or_empty(facts.interfaces))) == (str(node.home), True, True)


def test_a_directory_of_the_job_and_an_interpreter_that_hang_are_named(
    node: LocalNode, tmp_path: Path, golden: Golden
) -> None:
    place = tmp_path / "data"
    python = str(place / "env/bin/python")
    facts = probe_beside_hung(node, place, workdir=str(place / "job"), python=python)
    assert {one.path for one in facts.hung_paths} == {str(place / "job"), python}
    assert facts.cwd == NO_ANSWER
    golden.check("hung_interpreter.txt", reason_of(facts.python).replace(str(place), "PLACE") + "\n")


def test_places_mounted_noexec_are_found(node: LocalNode, tmp_path: Path) -> None:
    place = tmp_path / "noexec"
    place.mkdir()
    script = 'mount -t tmpfs -o noexec tmpfs "$0" && exec "$@"'
    isolated = ["unshare", "--mount", *(["--user", "--map-root-user"] if os.geteuid() else [])]
    command = [*isolated, "sh", "-c", script, str(place), *node.command, "probe"]
    env = node.env | {"TMPDIR": str(place), "TRITON_CACHE_DIR": str(place / "not/there/yet")}
    line = json.dumps({"schema": 1, "packages": False}) + "\n"
    done = subprocess.run(command, input=line.encode(), capture_output=True, env=env, timeout=600, check=True)
    facts = _facts(done.stdout)
    assert entries(facts.noexec) == {"TMPDIR": str(place), "TRITON_CACHE_DIR": str(place / "not/there/yet")}
