from __future__ import annotations

from typing import Any

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
from multinode.job.job import JobEnvironment, ScriptJob, TrainingJob
from multinode.job.launch_options import LaunchOptions
from multinode.stats.unknown import Entries, Unknown
from tests.golden import Golden

from .inspecting import SCRIPT, but, check_cases, inspection, silent

CONFIG = {"model_name_or_path": "models/tiny", "dataset": "mine", "dataset_dir": "data", "output_dir": "out"}
CACHE = "~/.cache/huggingface/datasets"
WELL = inspection(job=TrainingJob(config_path="sft.yaml", text="", config=CONFIG, local_paths=("models/tiny",)))


def place(path: str, kind: str = "directory", **more: Any) -> PathFact:
    return PathFact(path=path, kind=kind, **{"writable": True, **more})


def content(path: str, digest: str | Unknown = "0123456789abcdef", **more: Any) -> ContentFact:
    return ContentFact(path=path, digest=digest, **{"size_bytes": 100, **more})


def contents(*theirs: ContentFact, expected: tuple[ContentFact, ...]) -> Inspection:
    """Node a has what is expected, b has others; the directories are there on both."""
    paths = (place("models/tiny"), place("data"))
    return but(but(WELL, "a", contents=expected, paths=paths), "b", contents=theirs, paths=paths)


SCRIPT_ALONE = inspection(job=SCRIPT)
MODULE = inspection(job=ScriptJob(argv=("pkg.train",), form="module"))
PROGRAM = but(inspection(job=ScriptJob(argv=("bash", "run.sh"), form="executable")), "ab", tools={"bash": "/bin/bash"})
WITH_CONFIG = inspection(job=ScriptJob(argv=("train.py", "my config.yaml"), local_paths=("my config.yaml",)))
LACKS_CONFIG = but(WITH_CONFIG, "b", paths=(place("train.py", "file"), place("my config.yaml", "missing")))
WITH_DEEPSPEED = inspection(job=ScriptJob(argv=("train.py", "--deepspeed", "ds.json")))


def on_b(*paths: PathFact, job: Inspection = WELL, **facts: Any) -> Inspection:
    return but(job, "b", paths=paths, **facts)


def copied() -> Inspection:
    """Code is copied, and the adapter may be a name of the Hub: all these are missing on b."""
    files = tuple(CodeFile(path=path, digest="0" * 64, size_bytes=1) for path in ("train.py", "data/dataset_info.json"))
    code = CodeTree(source="/src", files=files)
    paths = tuple(place(path, "missing") for path in ("data", "data/dataset_info.json", "Qwen/Qwen2.5", "models/tiny"))
    job = TrainingJob(
        config_path="sft.yaml",
        text="",
        config={**CONFIG, "adapter_name_or_path": "Qwen/Qwen2.5"},
        local_paths=("models/tiny",),
    )
    return but(replace(WELL, job=job, options=LaunchOptions(code=code)), "b", paths=paths)


def test_an_input_that_is_missing_comes_with_the_command_that_brings_it(golden: Golden) -> None:
    nowhere = replace(SCRIPT_ALONE, absent_here={"train.py": "trian.py"})
    only_there = replace(WELL, absent_here={"models/tiny": None})
    elsewhere = replace(SCRIPT_ALONE, controller_cwd="/home/me/my job")
    missing = place("train.py", "missing")
    check_cases(
        golden,
        "paths_missing",
        {
            "a model": check_paths(on_b(place("models/my model", "missing"), place("data"))),
            "a script": check_paths(on_b(missing, job=SCRIPT_ALONE)),
            "a script, and so is the directory of the launch": check_paths(on_b(missing, job=elsewhere, cwd="/root")),
            "a missing script, with a file of a similar name": check_paths(but(nowhere, "ab", paths=(missing,))),
            "a model that only a has": check_paths(
                but(but(only_there, "a", paths=(place("models/tiny"),)), "b", paths=(place("models/tiny", "missing"),))
            ),
            "a directory, and what is in it": check_paths(
                on_b(
                    place("data/", "missing"),
                    place("data/dataset_info.json", "missing"),
                    place("database", "missing"),
                )
            ),
            "a path in the home directory": check_paths(on_b(place("~/models/x", "missing"))),
            "all that is neither copied nor a name of the Hub": check_paths(copied()),
            "a path, and no answer about the directory of the job": check_paths(
                on_b(place("models/tiny", "missing"), place("/data", "missing"), cwd=NO_ANSWER)
            ),
            "the DeepSpeed JSON of a script": check_paths(
                on_b(place("train.py", "file"), place("ds.json", "missing"), job=WITH_DEEPSPEED)
            ),
            "an argument that is a path here": check_arguments(LACKS_CONFIG),
            "the directory of the job": check_workdir(but(WELL, "b", cwd=Unknown("/nowhere is not a directory"))),
            "a module": check_program(but(MODULE, "b", absent_modules=("pkg.train",))),
            "a program that an interactive shell finds": check_program(
                but(PROGRAM, "b", tools={}, interactive=Entries({"bash": "/x/bash"}))
            ),
        },
    )


def test_what_is_no_input_or_another_checks_matter_is_no_missing_path() -> None:
    silent(check_paths(on_b(place("out", "missing"), place(CACHE, "missing"))))
    silent(check_paths(LACKS_CONFIG), check_arguments(but(WITH_CONFIG, "b", paths=(place("my config.yaml", "file"),))))
    silent(check_workdir(but(WELL, "b", cwd=NO_ANSWER)))
    silent(check_program(MODULE), check_program(but(SCRIPT_ALONE, "b", absent_modules=("pkg.train",))))
    silent(check_program(PROGRAM))
    silent(check_program(inspection(job=ScriptJob(argv=("./run.sh",), form="executable"))))


NOEXEC = Entries({"TMPDIR": "/tmp", "TRITON_CACHE_DIR": "/tmp", "$(evil)": "/"})


def test_a_path_that_cannot_be_used_is_found(golden: Golden) -> None:
    mounted = HungPath(path="data", place="/mnt/my data", filesystem="nfs4", device="store:/data")
    check_cases(
        golden,
        "paths_unusable",
        {
            "a mount hangs": check_hung_paths(but(WELL, "b", hung_paths=(mounted,))),
            "a path hangs": check_hung_paths(but(WELL, "b", hung_paths=(HungPath(path="data", place="/"),))),
            "nothing compiled can be loaded": check_noexec(but(WELL, "b", noexec=NOEXEC)),
            "output cannot be created": check_output(on_b(place("out", "missing", writable=False), user="jane")),
            "output cannot be written": check_output(on_b(place("out", writable=False), user="jane")),
            "output is a file": check_output(on_b(place("out", "file"), user="jane")),
        },
    )


def test_a_path_that_is_moved_or_need_not_be_written_is_well() -> None:
    moved = JobEnvironment(env={"TMPDIR": "/data", "TRITON_CACHE_DIR": "/data"})
    silent(check_noexec(but(replace(WELL, options=LaunchOptions(environment=moved)), "b", noexec=NOEXEC)))
    for path in (place("out"), place("out", "missing"), place("data", writable=False)):
        silent(check_output(on_b(path)))


INFO, MINE = content("data/dataset_info.json"), content("data/mine.json")
AT_ANOTHER_REVISION = contents(content(".git", "b" * 40), expected=(content(".git", "a" * 40),))


def many_that_differ() -> Inspection:
    names = [f"models/tiny/model-{number}.safetensors" for number in range(6)]
    other = contents(*(content(name, "f" * 64) for name in names), expected=tuple(content(name) for name in names))
    return replace(other, cluster=replace(other.cluster, hosts="my hosts"))


def test_content_that_differs_is_told_with_the_command_that_makes_it_alike(golden: Golden) -> None:
    config = "models/tiny/config.json"
    of_b = contents(content(config, "fedcba9876543210", size_bytes=90), expected=(content(config),))
    checkouts = but(
        but(copied(), "a", contents=(content(".git", "1" * 40),)), "b", contents=(content(".git", "2" * 40),)
    )
    check_cases(
        golden,
        "paths_content",
        {
            "one file": check_contents(of_b),
            "many files": check_contents(many_that_differ()),
            "b lacks a file": check_contents(contents(INFO, expected=(INFO, MINE))),
            "not read in time": check_contents(
                contents(content("data", Unknown("not read within 5 s")), expected=(INFO, MINE))
            ),
            "another revision": check_revisions(AT_ANOTHER_REVISION),
            "another revision, and no code is copied": check_revisions(
                replace(checkouts, options=LaunchOptions(code=None))
            ),
        },
    )
    silent(check_revisions(checkouts), check_contents(AT_ANOTHER_REVISION))


def test_a_directory_that_is_missing_is_no_file_that_differs() -> None:
    lacking = contents(INFO, expected=(INFO, MINE))
    silent(check_contents(but(lacking, "b", paths=(place("data", "missing"),))))


def test_equal_content_is_well_and_one_node_has_nothing_to_compare_with() -> None:
    same = (MINE, content(".git", "a" * 40))
    silent(check_contents(contents(*same, expected=same)), check_revisions(contents(*same, expected=same)))
    silent(check_revisions(contents(expected=(content(".git", "a" * 40),))))
    alone = but(inspection("a", job=WELL.job), "a", contents=(content("data", Unknown("slow")),))
    silent(check_contents(alone), check_revisions(alone))


def shared(
    caches: tuple[dict[str, str], ...], data: dict[str, str] | None = None, *, told: bool | None = None
) -> Inspection:
    config = CONFIG if told is None else CONFIG | {"data_shared_file_system": told}
    found = inspection(job=TrainingJob(config_path="sft.yaml", text="", config=config))
    for name, cache in zip("ab", caches, strict=True):
        found = but(found, name, paths=(place(CACHE, "missing", **cache), place("data", **(data or cache))))
    return found


LOCAL = {"filesystem": "ext4", "device": "/dev/nvme0n1p2"}
NFS = {"filesystem": "nfs4", "device": "store:/export/home"}
ROOTLESS = {"filesystem": "fuse.fuse-overlayfs", "device": "fuse-overlayfs"}


def test_a_file_system_that_is_not_as_the_job_says_is_told(golden: Golden) -> None:
    check_cases(
        golden,
        "paths_shared",
        {
            "promised, and it is local": check_shared(shared((LOCAL, LOCAL), told=True)),
            "promised, and it is a container's own": check_shared(shared((ROOTLESS, ROOTLESS), told=True)),
            "shared, and the job does not say so": check_shared(shared((NFS, NFS))),
            "shared, and the job denies it": check_shared(shared((NFS, NFS), told=False)),
        },
    )


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
