"""nccl-test --tune on nodes that are not there: a stand-in for NCCL says what each setting takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from multinode.cluster.hostfile import parse_hostfile
from multinode.errors import Interrupted, RunFailed
from multinode.launch.context import Launch, RunContext, StopRequest
from multinode.network.measure import Extent, scan_messages
from multinode.network.nccl_tuning import TuneReport
from multinode.network.nic_path import NcclPath
from multinode.network.size_scan import ScanReport
from multinode.network.tune import nccl_tune
from multinode.network.tuning_screen import show
from multinode.records.benchmark import CollectiveTest
from multinode.records.run import Run
from multinode.render.table import screen_text
from multinode.render.terminal import block_parts
from multinode.stats.estimate import Estimate
from multinode.transport.fake import FakeTransport
from tests import make
from tests.golden import Golden, raised
from tests.network.test_size_scan import measured, plan, report

HOSTS = "a slots=1\nb slots=1\n"
TEST = CollectiveTest(messages=scan_messages(["all_reduce"], [4096, 1 << 20, 16 << 20]))
GPU = {"index": 0, "name": "NVIDIA A100-SXM4-80GB", "uuid": "GPU-1"}
SCAN = report(plan(), measured(plan()))


class StandIn:
    """Takes for NCCL: `speed` gives the speed-up of a run with these variables, by its number."""

    def __init__(
        self, runs: Path, speed: Callable[[dict[str, str], int], float], *, gpus: bool = True, keeps: bool = False
    ) -> None:
        self.asked: list[dict[str, str]] = []  # the variables of each run, in order
        self.said: list[str] = []  # every stage
        self.stop = StopRequest()
        self.nccl = NcclPath(version="2.27.5+cuda12.9", network="Socket")
        self._speed = speed
        self._keeps = keeps  # whether runs are stored
        facts = {"kind": "facts", "gpus": [GPU] if gpus else [], "nccl_version": "2.27.5", "time_s": 0.0}
        transport = FakeTransport(lambda *_: [json.dumps(facts).encode() + b"\n"])
        self.context = RunContext(transport, runs, stop=self.stop, say=self.said.append)

    def tune(self, repeats: int = 3, test: CollectiveTest = TEST) -> TuneReport:
        what = Launch(cluster=parse_hostfile(HOSTS, "hosts"), hostfile=HOSTS, job=test, agent="agent.pyz")
        return nccl_tune(what, Extent(), repeats, self.context, self._measure)

    def _measure(self, what: Launch, extent: Extent, context: RunContext) -> ScanReport:
        assert not extent.tcp
        assert (what.execute.kind, what.execute.on_stall) == ("tune", "stop")
        env = dict(what.environment.env)
        self.asked.append(env)
        factor = self._speed(env, len(self.asked))
        if self._keeps:
            make.store(context.runs, what.run_id or "", summary={})
        rows = tuple(msgspec.structs.replace(row, time_us=row.time_us * (1 / factor)) for row in SCAN.rows)
        return msgspec.structs.replace(SCAN, backend="nccl", rows=rows, nccl=self.nccl)


def noise(number: int) -> float:
    """Half a percent, up and down."""
    return 0.995 if number // 3 % 2 else 1.005


def more_sockets(env: dict[str, str], number: int) -> float:
    """A NIC that several sockets fill, whose NCCL chooses well by itself."""
    sockets = int(env.get("NCCL_SOCKET_NTHREADS", "1")) * int(env.get("NCCL_NSOCKS_PERTHREAD", "1"))
    gain = {1: 1.0, 4: 1.1, 16: 1.25, 32: 1.2, 64: 0.7}[sockets]
    return gain * (0.6 if env.get("NCCL_PROTO") == "LL" else 1.0) * noise(number)


def said(report: TuneReport, *, details: bool = False) -> str:
    """What is printed, without line breaks."""
    return " ".join(screen_text(block_parts(show(report), details=details)).split())


def screens(report: TuneReport) -> dict[str, str]:
    return {
        "": screen_text(block_parts(show(report))),
        "--details": screen_text(block_parts(show(report), details=True)),
    }


def test_the_best_of_each_axis_is_measured_anew_and_said_with_its_interval(tmp_path: Path, golden: Golden) -> None:
    stand_in = StandIn(tmp_path, more_sockets)
    found = stand_in.tune()
    assert found.winner in [
        {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
        {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "8"},
    ]
    assert found.together is not None
    assert isinstance(found.together.gain, Estimate)
    assert found.together.gain.repeats == 5
    assert found.together.gain.value == pytest.approx(1.25, rel=0.02)
    golden.check_texts("tune_sockets", screens(found), tmp_path, {found.run_id: "RUN"})
    assert any(line.endswith(" left") for line in stand_in.said)
    stored = msgspec.json.decode((tmp_path / found.run_id / "tune.json").read_bytes(), type=TuneReport)
    assert stored == found
    assert msgspec.json.decode((tmp_path / found.run_id / "run.json").read_bytes(), type=Run).status == "succeeded"


def test_settings_take_turns_every_second_one_backwards(tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path, lambda *_: 1.0)
    found = stand_in.tune(repeats=2)
    tried = [{}, *(setting.env for setting in found.settings)]
    # Once before the rest, so that the first turn is no warm-up.
    assert stand_in.asked == [{}, *tried, *reversed(tried)]
    assert (found.together, found.winner) == (None, {})
    assert said(found).startswith("Keep NCCL's default: no setting is certain to be faster")


def test_what_is_the_luckiest_of_many_does_not_win_when_it_is_measured_anew(tmp_path: Path) -> None:
    lucky = {"NCCL_BUFFSIZE": "8388608"}
    stand_in = StandIn(tmp_path, lambda env, number: (1.3 if env == lucky and number <= 43 else 1.0) * noise(number))
    found = stand_in.tune()
    assert found.together is not None
    assert (found.together.env, found.winner) == (lucky, {})
    assert said(found).startswith("Inconclusive: NCCL_BUFFSIZE=8388608, measured again, is within noise")


def test_a_setting_that_fails_is_left_out_with_its_reason(tmp_path: Path, golden: Golden) -> None:
    def speed(env: dict[str, str], number: int) -> float:
        if "NCCL_ALGO" in env:
            raise RunFailed("no algorithm/protocol available for function AllGather", node="a")
        return 1.2 * noise(number) if env.get("NCCL_PROTO") == "Simple" else noise(number)

    stand_in = StandIn(tmp_path, speed)
    found = stand_in.tune()
    reasons = {setting.text: setting.failure for setting in found.settings if setting.failure}
    assert set(reasons) == {"NCCL_ALGO=Ring", "NCCL_ALGO=allreduce:tree"}
    assert sum("NCCL_ALGO" in env for env in stand_in.asked) == 2
    assert found.winner == {"NCCL_PROTO": "Simple"}
    golden.check_texts("tune_failed_settings", screens(found), tmp_path, {found.run_id: "RUN"})


def test_what_was_measured_before_ctrl_c_is_kept(tmp_path: Path, golden: Golden) -> None:
    def speed(_: dict[str, str], number: int) -> float:
        if number == 33:
            stand_in.stop.ask("SIGINT")
        return noise(number)

    stand_in = StandIn(tmp_path, speed)
    interrupted = raised(Interrupted, stand_in.tune)
    (path,) = tmp_path.glob("*/tune.json")
    golden.check_errors("tune_interrupted", {"Ctrl-C": interrupted}, shown={path.parent.name: "RUN"})
    stored = msgspec.json.decode(path.read_bytes(), type=TuneReport)
    # In the third turn.
    assert {setting.gain.repeats for setting in stored.settings if isinstance(setting.gain, Estimate)} == {2, 3}


class KilledError(BaseException):
    """What ends the process at once."""


@pytest.mark.parametrize("last", [1, 20, 40])
def test_a_tuning_that_is_killed_resumes_and_repeats_nothing(tmp_path: Path, last: int) -> None:
    def speed(env: dict[str, str], number: int) -> float:
        if number > last:
            raise KilledError
        return more_sockets(env, number)

    stand_in = StandIn(tmp_path, speed, keeps=True)
    with pytest.raises(KilledError):
        stand_in.tune()
    again = StandIn(tmp_path, lambda env, number: more_sockets(env, number + last), keeps=True)
    found = again.tune()
    whole = StandIn(tmp_path / "whole", more_sockets)
    expected = whole.tune()
    assert [*stand_in.asked[:last], *again.asked] == whole.asked
    assert found.winner == expected.winner
    assert found.settings == expected.settings
    assert again.said[0].startswith("resuming tuning ")


def test_over_rdma_sockets_are_no_question(tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path, lambda *_: 1.0)
    stand_in.nccl = NcclPath(version="2.20.5+cuda12.4", network="IB")
    assert "sockets" not in {setting.axis for setting in stand_in.tune(repeats=2).settings}


@pytest.mark.parametrize("backend", ["gloo", None])
def test_for_gloo_there_is_nothing_to_tune(tmp_path: Path, backend: str | None) -> None:
    stand_in = StandIn(tmp_path, lambda *_: 1.0, gpus=False)
    found = stand_in.tune(test=msgspec.structs.replace(TEST, backend=backend))
    assert (found.backend, stand_in.asked, list(tmp_path.iterdir())) == ("gloo", [], [])
    assert said(found).startswith("Nothing to tune: gloo uses one connection")
