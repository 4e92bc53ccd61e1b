from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from multinode.core.cluster import Cluster, Node
from multinode.core.collective_test import CollectiveTest
from multinode.core.facts import Gpu, NodeFacts, PathFact
from multinode.core.finding import SEVERITIES, Finding
from multinode.core.job import LlamaFactoryJob, ScriptJob
from multinode.errors import ConnectError, NodeFailed
from multinode.preflight.checks import (
    check_backend,
    check_interpreter,
    check_packages,
    check_paths,
    check_port,
    check_port_free,
    check_ssh,
    check_versions,
    check_workdir,
)
from multinode.preflight.connect import Listening, Reached
from multinode.preflight.launch_checks import check_before_launch, raise_first_error

CLUSTER = Cluster(nodes=(Node(name="a"), Node(name="b")), source="hosts")
PACKAGES = {"torch": "2.8.0", "llamafactory": "0.9.5"}
SCRIPT = ScriptJob(argv=("train.py",))
SFT = LlamaFactoryJob(config_path="sft.yaml", text="", config={})


def facts(name: str) -> NodeFacts:
    return NodeFacts(
        node=name, python="/env/bin/python", packages=PACKAGES, cwd="/work", gpus=(Gpu(index=0, name="x"),)
    )


def both(**changed: object) -> dict[str, NodeFacts]:
    """Facts of two nodes that are well, but for what is changed on b."""
    return {"a": facts("a"), "b": msgspec.structs.replace(facts("b"), **changed)}


def only(findings: Iterable[Finding]) -> Finding:
    """The one finding, which must be something its user can act on."""
    (finding,) = findings
    assert finding.severity in SEVERITIES
    assert finding.hint
    return finding


def test_nodes_that_are_well_have_no_findings() -> None:
    assert list(check_before_launch(CLUSTER, both(), SFT, 29500)) == []
    assert list(check_versions(CLUSTER, both())) == []
    assert list(check_paths(CLUSTER, both())) == []


def test_nodes_without_facts_have_no_findings_but_that_of_ssh() -> None:
    assert list(check_before_launch(CLUSTER, {}, SFT, 29500)) == []
    assert list(check_versions(CLUSTER, {})) == []
    assert list(check_paths(CLUSTER, {})) == []
    finding = only(check_ssh([ConnectError("no SSH connection to b port 22: refused", node="b", hint="start sshd")]))
    assert (finding.node, finding.check, finding.hint) == ("b", "ssh", "start sshd")


def test_a_missing_interpreter_is_told_with_the_reason() -> None:
    finding = only(check_interpreter(CLUSTER, both(python=None, missing={"python": "/env/bin/python does not exist"})))
    assert (finding.severity, finding.node) == ("error", "b")
    assert finding.message == "no interpreter for the job: /env/bin/python does not exist"
    assert "python=" in str(finding.hint)


def test_a_package_that_the_job_needs_is_missed_and_one_that_it_does_not_need_is_not() -> None:
    without = both(packages={"torch": "2.8.0"})
    assert list(check_packages(CLUSTER, without, SCRIPT)) == []
    finding = only(check_packages(CLUSTER, without, SFT))
    assert finding.message == "llamafactory not installed for /env/bin/python"
    assert "/env/bin/python -m pip install llamafactory" in str(finding.hint)
    assert "torch and llamafactory" in only(check_packages(CLUSTER, both(packages={}), SFT)).message


def test_packages_that_could_not_be_read_are_not_said_to_be_missing() -> None:
    unread = both(packages={}, missing={"packages": "the interpreter did not answer in 15 s"})
    assert list(check_packages(CLUSTER, unread, SFT)) == []
    assert list(check_packages(CLUSTER, both(packages={}, python=None), SFT)) == []


def test_a_version_that_differs_from_the_first_nodes_is_named_with_both() -> None:
    finding = only(check_versions(CLUSTER, both(packages=PACKAGES | {"torch": "2.7.1"})))
    assert finding.node == "b"
    assert finding.message.startswith("torch is 2.7.1 here and 2.8.0 on a")
    assert finding.hint == "on b: /env/bin/python -m pip install torch==2.8.0"


def test_a_package_that_only_one_node_has_is_no_difference_of_versions() -> None:
    assert list(check_versions(CLUSTER, both(packages=PACKAGES | {"deepspeed": "0.19.8"}))) == []


@pytest.mark.parametrize(
    ("path", "copy"),
    [
        ("/data/set", "rsync -a /data/set b:/data/"),
        ("data/my set", "rsync -a 'data/my set' b:/work/data/"),
        ("tiny", "rsync -a tiny b:/work/"),
    ],
)
def test_a_missing_path_comes_with_the_command_that_copies_it(path: str, copy: str) -> None:
    there = PathFact(path="/models", kind="directory")
    finding = only(check_paths(CLUSTER, both(paths=(there, PathFact(path=path, kind="missing")))))
    assert (finding.node, finding.hint) == ("b", f"copy it there: {copy}")


def test_a_missing_workdir_and_a_taken_port_are_found() -> None:
    finding = only(check_workdir(CLUSTER, both(missing={"workdir": "/work does not exist"})))
    assert finding.message == "the job's directory: /work does not exist"
    first = {"a": msgspec.structs.replace(facts("a"), port_users={"29500": "python3 (pid 7, user eve)"})}
    finding = only(check_port_free(CLUSTER, first, 29500))
    assert finding.message == "port 29500, the rendezvous, is in use by python3 (pid 7, user eve)"
    assert "--master-port" in str(finding.hint)
    assert list(check_port_free(CLUSTER, first, 29501)) == []
    assert list(check_port_free(CLUSTER, both(port_users={"29500": "x"}), 29500)) == []


def test_nccl_without_a_gpu_is_found_and_gloo_is_well() -> None:
    bare = both(gpus=(), missing={"gpus": "nvidia-smi not found"})
    finding = only(check_backend(CLUSTER, bare, CollectiveTest(sizes_bytes=(8,), backend="nccl")))
    assert (finding.node, "nvidia-smi not found" in finding.message) == ("b", True)
    assert list(check_backend(CLUSTER, bare, CollectiveTest(sizes_bytes=(8,), backend="gloo"))) == []
    assert list(check_backend(CLUSTER, bare, SCRIPT)) == []


@pytest.mark.parametrize(
    ("error", "hint"), [("timed out", "firewall"), ("no route", "addr= or ifname="), ("refused", "right address")]
)
def test_a_node_that_cannot_reach_the_rendezvous_is_told_why(error: str, hint: str) -> None:
    answer = Reached(addr="10.0.0.1", port=29500, ok=False, error=error)
    finding = only(check_port(CLUSTER, 29500, Listening(ports=(29500,)), {"b": answer}))
    assert finding.message == f"it cannot reach a at 10.0.0.1:29500 ({error}): the rendezvous would hang"
    assert hint in str(finding.hint)
    fine = Reached(addr="10.0.0.1", port=29500, ok=True, ms=0.3)
    assert list(check_port(CLUSTER, 29500, Listening(ports=(29500,)), {"b": fine})) == []


def test_a_port_that_could_not_be_bound_is_the_first_nodes() -> None:
    finding = only(check_port(CLUSTER, 29500, Listening(failed={29500: "in use by nginx (pid 3, user root)"}), {}))
    assert (finding.node, finding.message) == (
        "a",
        "port 29500, the rendezvous, is in use by nginx (pid 3, user root)",
    )


def test_the_first_error_stops_a_launch_and_names_the_others() -> None:
    warning = Finding(severity="warning", node="a", check="x", message="slow")
    first = Finding(severity="error", node="a", check="x", message="no torch", hint="pip install torch")
    second = msgspec.structs.replace(first, node="b")
    raise_first_error([warning])
    with pytest.raises(NodeFailed) as caught:
        raise_first_error([warning, first, second])
    assert (caught.value.node, caught.value.message, caught.value.hint) == ("a", "no torch", "pip install torch")
    assert caught.value.detail == "also b: no torch"
