from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from multinode.check.paths import (
    check_arguments,
    check_contents,
    check_hung_paths,
    check_noexec,
    check_output,
    check_paths,
    check_program,
    check_revisions,
    check_shared,
    check_workdir,
)
from multinode.check.rule import Inspection
from multinode.cluster.facts import NO_ANSWER, ContentFact, HungPath, PathFact
from multinode.job.code_tree import CodeFile, CodeTree
from multinode.job.job import JobEnvironment, LlamaFactoryJob, ScriptJob
from multinode.job.launch_options import LaunchOptions
from multinode.stats.unknown import Entries, Unknown

from .inspecting import SCRIPT, but, expect, inspection, only, silent

CONFIG = {"model_name_or_path": "models/tiny", "dataset": "mine", "dataset_dir": "data", "output_dir": "out"}
CACHE = "~/.cache/huggingface/datasets"
WELL = inspection(job=LlamaFactoryJob(config_path="sft.yaml", text="", config=CONFIG, local_paths=("models/tiny",)))


def place(path: str, kind: str = "directory", **more: Any) -> PathFact:
    return PathFact(path=path, kind=kind, **{"writable": True, **more})


def content(path: str, digest: str | Unknown = "0123456789abcdef", **more: Any) -> ContentFact:
    return ContentFact(path=path, digest=digest, **{"size_bytes": 100, **more})


def contents(*theirs: ContentFact, expected: tuple[ContentFact, ...]) -> Inspection:
    """Node a has what is expected, b has others; the directories are there on both."""
    paths = (place("models/tiny"), place("data"))
    return but(but(WELL, "a", contents=expected, paths=paths), "b", contents=theirs, paths=paths)


def test_what_is_missing_is_told_with_the_command_that_brings_it() -> None:
    finding = expect(
        check_paths(but(WELL, "b", paths=(place("models/my model", "missing"), place("data")))), "error", "b"
    )
    assert finding.hint == "copy it to the nodes; run in this directory:\nmultinode copy 'models/my model'"
    script = inspection(job=SCRIPT)
    assert "train.py is missing" in only(check_paths(but(script, "b", paths=(place("train.py", "missing"),)))).message


def test_where_the_launchs_directory_is_not_on_a_node_that_is_said_and_all_of_it_copied() -> None:
    script = replace(inspection(job=SCRIPT), controller_cwd="/home/me/my job")
    finding = only(check_paths(but(script, "b", paths=(place("train.py", "missing"),), cwd="/root")))
    assert "train.py is missing in /root, where the job would run: /home/me/my job" in finding.message
    assert finding.hint == (
        "copy the directory; run in it:\nssh b mkdir -p '/home/me/my job' && scp -rp . b:'/home/me/my job'/"
    )


def test_a_file_that_is_nowhere_is_no_file_to_copy() -> None:
    script = replace(inspection(job=SCRIPT), absent_here={"train.py": "trian.py"})
    missing = but(script, "ab", paths=(place("train.py", "missing"),))
    finding = only(check_paths(missing))
    assert "train.py is missing on a and b and on this machine" in finding.message
    assert finding.message.endswith("Did you mean trian.py?")
    assert "scp" not in (finding.hint or "")


def test_a_file_that_only_a_node_has_comes_from_there() -> None:
    one = replace(WELL, absent_here={"models/tiny": None})
    lacking = but(but(one, "a", paths=(place("models/tiny"),)), "b", paths=(place("models/tiny", "missing"),))
    finding = only(check_paths(lacking))
    assert "models/tiny is missing here but present on a" in finding.message
    assert finding.hint == "copy it from there:\nmultinode copy --from a models/tiny"


def test_without_the_jobs_directory_nothing_is_looked_for_in_it() -> None:
    lacking = but(WELL, "b", cwd=NO_ANSWER, paths=(place("models/tiny", "missing"), place("/data", "missing")))
    assert "/data is missing" in only(check_paths(lacking)).message


def test_a_path_that_hangs_names_its_file_system() -> None:
    hung = HungPath(path="data", place="/mnt/my data", filesystem="nfs4", device="store:/data")
    finding = only(check_hung_paths(but(WELL, "b", hung_paths=(hung,))))
    assert "data does not answer: store:/data (nfs4), mounted at /mnt/my data, hangs" in finding.message
    assert finding.hint == "is its server up? On b, as root:\numount -fl '/mnt/my data' && mount '/mnt/my data'"
    other = only(check_hung_paths(but(WELL, "b", hung_paths=(HungPath(path="data", place="/"),))))
    assert other.message == "data does not answer: the job would hang there"


def test_a_place_where_nothing_compiled_can_be_loaded_is_moved() -> None:
    noexec = {"TMPDIR": "/tmp", "TRITON_CACHE_DIR": "/tmp", "$(evil)": "/"}
    finding = only(check_noexec(but(WELL, "b", noexec=Entries(noexec))))
    assert "/tmp of b are mounted noexec" in finding.message
    assert finding.hint == "use other directories:\n--env TMPDIR=/var/tmp --env TRITON_CACHE_DIR=/var/tmp/triton"
    moved = JobEnvironment(env={"TMPDIR": "/data", "TRITON_CACHE_DIR": "/data"})
    silent(check_noexec(but(replace(WELL, options=LaunchOptions(environment=moved)), "b", noexec=Entries(noexec))))


def test_what_is_copied_and_what_may_be_a_name_of_a_hub_need_not_be_there() -> None:
    files = tuple(CodeFile(path=path, digest="0" * 64, size_bytes=1) for path in ("train.py", "data/dataset_info.json"))
    code = CodeTree(source="/src", files=files)
    paths = tuple(place(path, "missing") for path in ("data", "data/dataset_info.json", "Qwen/Qwen2.5", "models/tiny"))
    job = LlamaFactoryJob(
        config_path="sft.yaml",
        text="",
        config={**CONFIG, "adapter_name_or_path": "Qwen/Qwen2.5"},
        local_paths=("models/tiny",),
    )
    found = but(replace(WELL, job=job, options=LaunchOptions(code=code)), "b", paths=paths)
    assert only(check_paths(found)).message.startswith("models/tiny is missing")
    checkouts = but(but(found, "a", contents=(content(".git", "1" * 40),)), "b", contents=(content(".git", "2" * 40),))
    assert only(check_revisions(replace(checkouts, options=LaunchOptions(code=None)))).severity == "warning"
    silent(check_revisions(checkouts))


def test_of_a_missing_directory_what_is_in_it_is_not_told_too() -> None:
    paths = (place("data/", "missing"), place("data/dataset_info.json", "missing"), place("database", "missing"))
    told = [finding.message for finding in check_paths(but(WELL, "b", paths=paths))]
    assert ["data/ is missing" in told[0], "database is missing" in told[1], len(told)] == [True, True, 2]


def test_a_home_directory_is_that_of_each_node() -> None:
    finding = only(check_paths(but(WELL, "b", paths=(place("~/models/x", "missing"),))))
    assert finding.hint == "copy it to the nodes; run in this directory:\nmultinode copy '~/models/x'"


def test_what_is_only_written_need_not_be_there_yet() -> None:
    silent(check_paths(but(WELL, "b", paths=(place("out", "missing"), place(CACHE, "missing")))))


@pytest.mark.parametrize(
    ("fact", "what"),
    [
        (place("out", "missing", writable=False), "cannot be created by jane"),
        (place("out", "directory", writable=False), "cannot be written by jane"),
        (place("out", "file"), "is a file"),
    ],
)
def test_an_output_directory_that_cannot_be_written_is_found(fact: PathFact, what: str) -> None:
    expect(
        check_output(but(WELL, "b", paths=(fact,), user="jane")),
        "error",
        "b",
        what,
        hint="sudo mkdir -p /work/out && sudo chown jane /work/out",
    )


def test_an_output_directory_that_is_there_or_can_be_made_is_well() -> None:
    for kind in ("directory", "missing"):
        silent(check_output(but(WELL, "b", paths=(place("out", kind),))))
    silent(check_output(but(WELL, "b", paths=(place("data", writable=False),))))


def test_a_directory_of_the_job_that_is_not_there_is_told() -> None:
    lacking = but(WELL, "b", cwd=Unknown("/nowhere is not a directory"))
    silent(check_workdir(but(WELL, "b", cwd=NO_ANSWER)))
    assert "/nowhere is not a directory" in only(check_workdir(lacking)).message


def test_other_content_at_the_same_path_is_told_with_both_digests() -> None:
    config = "models/tiny/config.json"
    other = contents(content(config, "fedcba9876543210", size_bytes=90), expected=(content(config),))
    expect(
        check_contents(other),
        "error",
        "b",
        f"{config} differs from a: fedcba987654 (90 bytes) here, 0123456789ab (100 bytes)",
        check="content",
        hint=f"if that of a is right:\nmultinode copy --from a {config}",
    )


def test_many_files_that_differ_are_one_finding() -> None:
    names = [f"models/tiny/model-{number}.safetensors" for number in range(6)]
    other = contents(*(content(name, "f" * 64) for name in names), expected=tuple(content(name) for name in names))
    finding = only(check_contents(replace(other, cluster=replace(other.cluster, hosts="my hosts"))))
    message = finding.message
    assert finding.hint == "if that of a is right:\nmultinode copy --hosts 'my hosts' --from a models/tiny"
    assert f"likewise {names[1]}, {names[2]}, {names[3]} and 2 more" in message


def test_a_file_that_one_node_lacks_is_told_and_a_directory_that_lacks_is_another_finding() -> None:
    expected = (content("data/dataset_info.json"), content("data/mine.json"))
    lacking = contents(expected[0], expected=expected)
    finding = only(check_contents(lacking))
    assert finding.severity == "error"
    assert "data/mine.json is missing here but present on a" in finding.message
    assert finding.hint == "copy it from there:\nmultinode copy --from a data/mine.json"
    gone = but(lacking, "b", paths=(place("data", "missing"),))
    silent(check_contents(gone))


def test_what_was_not_read_is_a_note_and_taken_for_neither_equal_nor_absent() -> None:
    expected = (content("data/dataset_info.json"), content("data/mine.json"))
    slow = contents(content("data", Unknown("not read within 5 s")), expected=expected)
    expect(check_contents(slow), "note", "b", "data could not be compared with the other nodes: not read within 5 s")


def test_equal_content_is_well_and_one_node_has_nothing_to_compare_with() -> None:
    same = (content("data/mine.json"), content(".git", "a" * 40))
    silent(check_contents(contents(*same, expected=same)), check_revisions(contents(*same, expected=same)))
    alone = but(inspection("a", job=WELL.job), "a", contents=(content("data", Unknown("slow")),))
    assert list(check_contents(alone)) == list(check_revisions(alone)) == []


def test_checkouts_at_different_revisions_are_a_warning() -> None:
    other = contents(content(".git", "b" * 40), expected=(content(".git", "a" * 40),))
    silent(check_contents(other))
    expect(
        check_revisions(other),
        "warning",
        "b",
        "at bbbbbbbbbbbb here and at aaaaaaaaaaaa",
        hint=f"git -C /work checkout {'a' * 40}",
    )
    silent(check_revisions(contents(expected=(content(".git", "a" * 40),))))


def shared(
    caches: tuple[dict[str, str], ...], data: dict[str, str] | None = None, *, told: bool | None = None
) -> Inspection:
    config = CONFIG if told is None else CONFIG | {"data_shared_file_system": told}
    found = inspection(job=LlamaFactoryJob(config_path="sft.yaml", text="", config=config))
    for name, cache in zip("ab", caches, strict=True):
        found = but(found, name, paths=(place(CACHE, "missing", **cache), place("data", **(data or cache))))
    return found


LOCAL = {"filesystem": "ext4", "device": "/dev/nvme0n1p2"}
NFS = {"filesystem": "nfs4", "device": "store:/export/home"}
ROOTLESS = {"filesystem": "fuse.fuse-overlayfs", "device": "fuse-overlayfs"}


def test_a_promise_of_a_shared_file_system_that_is_not_kept_is_a_warning() -> None:
    finding = only(check_shared(shared((LOCAL, LOCAL), told=True)))
    assert (finding.severity, finding.code) == ("warning", "shared")
    assert "here: ext4" in finding.message
    assert finding.hint == "--set data_shared_file_system=false"
    assert list(check_shared(shared((ROOTLESS, ROOTLESS), told=True))) != []


def test_a_shared_file_system_that_the_job_makes_nothing_of_is_a_note() -> None:
    for told in (None, False):
        finding = only(check_shared(shared((NFS, NFS), told=told)))
        assert finding.severity == "note"
        assert "store:/export/home" in finding.message
        assert finding.hint is not None
        assert "--set data_shared_file_system=true" in finding.hint


def test_what_is_as_the_job_says_or_cannot_be_told_is_well() -> None:
    silent(check_shared(shared((NFS, NFS), told=True)), check_shared(shared((LOCAL, LOCAL))))
    # The first node serves the others from its own disk.
    silent(
        check_shared(shared((LOCAL, NFS), told=True)),
        check_shared(shared((LOCAL, LOCAL), NFS, told=True)),
        check_shared(shared((NFS, NFS | {"device": "other:/home"}))),
        check_shared(shared((ROOTLESS, ROOTLESS))),
        check_shared(shared(({}, {}), told=True)),
    )


def test_a_module_that_no_node_could_import_is_refused() -> None:
    module = inspection(job=ScriptJob(argv=("pkg.train",), form="module"))
    finding = expect(check_program(but(module, "b", absent_modules=("pkg.train",))), "error", "b")
    assert "/env/bin/python finds no module pkg.train, neither in /work" in finding.message
    silent(check_program(module), check_program(but(inspection(job=SCRIPT), "b", absent_modules=("pkg.train",))))


def test_a_program_that_is_not_on_the_path_is_refused() -> None:
    program = inspection(job=ScriptJob(argv=("bash", "run.sh"), form="executable"))
    there = but(program, "ab", tools={"bash": "/bin/bash"})
    silent(check_program(there))
    finding = expect(check_program(but(there, "b", tools={}, interactive=Entries({"bash": "/x/bash"}))), "error", "b")
    assert "bash is not on the PATH of a non-interactive shell; an interactive shell finds /x/bash" in finding.message
    silent(check_program(inspection(job=ScriptJob(argv=("./run.sh",), form="executable"))))


def test_an_argument_that_is_a_path_here_and_not_on_a_node_is_warned_about() -> None:
    script = inspection(job=ScriptJob(argv=("train.py", "my config.yaml"), local_paths=("my config.yaml",)))
    lacking = but(script, "b", paths=(place("train.py", "file"), place("my config.yaml", "missing")))
    finding = expect(check_arguments(lacking), "warning", "b")
    assert finding.hint is not None
    assert finding.hint.endswith("multinode copy 'my config.yaml'")
    # It is no input that the job is sure to read.
    silent(check_paths(lacking), check_arguments(but(script, "b", paths=(place("my config.yaml", "file"),))))


def test_the_deepspeed_json_of_a_script_is_an_input() -> None:
    script = inspection(job=ScriptJob(argv=("train.py", "--deepspeed", "ds.json")))
    lacking = but(script, "b", paths=(place("train.py", "file"), place("ds.json", "missing")))
    assert "ds.json is missing" in only(check_paths(lacking)).message
