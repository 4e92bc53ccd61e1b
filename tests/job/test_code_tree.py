"""Which files of a directory travel with a job, with git's own repositories and without git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from multinode.errors import MultinodeError
from multinode.job.code_tree import CodeTree, is_secret_file, read_code
from multinode.node.manifest import Manifest
from tests.golden import Golden, error_of

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 12345\n".format("0" * 64)
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n"


def git(folder: Path, *words: str) -> None:
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    options = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", str(folder), *options, *words], check=True, capture_output=True, env=env)


def write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    return made


@pytest.fixture
def repository(folder: Path) -> Path:
    git(folder, "init", "-q")
    write(folder, {"train.py": "print(1)", "lib/a.py": "a", ".gitignore": "*.log\nlocal/\n"})
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "all")
    return folder


def names(code: CodeTree) -> list[str]:
    return [file.path for file in code.files]


def test_what_git_tracks_or_would_is_copied_and_what_it_ignores_stays(repository: Path) -> None:
    write(repository, {"new.py": "new", "out.log": "ignored", "local/weights": "ignored"})
    (repository / "lib" / "a.py").write_text("edited, not committed")
    code = read_code(repository, repository)
    assert names(code) == [".gitignore", "lib/a.py", "new.py", "train.py"]
    assert (code.source, code.cwd, code.links, code.notes) == (str(repository), ".", {}, ())
    assert code.left_out == ("local", "out.log")
    assert code.size_bytes == sum((repository / name).stat().st_size for name in names(code))
    assert code.copy().files == 4


def test_what_was_removed_since_is_not_missed(repository: Path) -> None:
    (repository / "lib" / "a.py").unlink()
    assert names(read_code(repository, repository)) == [".gitignore", "train.py"]


def test_a_directory_of_a_checkout_is_copied_alone_and_the_job_runs_at_its_place(repository: Path) -> None:
    write(repository, {"lib/sub/b.py": "b"})
    code = read_code(repository / "lib", repository / "lib" / "sub")
    assert (names(code), code.cwd) == (["a.py", "sub/b.py"], "sub")
    assert [code.holds(path) for path in ("b.py", "../a.py", "..", "a.py", "../../train.py", "/a.py", "~/a.py")] == [
        *(True, True, True),
        *(False, False, False, False),
    ]
    assert code.place("r", "/home/u") == "/home/u/.multinode/code/r/tree/sub"


def test_from_elsewhere_the_job_runs_at_the_top(repository: Path, tmp_path: Path) -> None:
    code = read_code(repository, tmp_path)
    assert code.cwd == "."
    assert code.holds("./lib")
    assert not code.holds("li")


def test_secrets_stay_though_git_tracks_them_and_that_is_said(repository: Path) -> None:
    write(repository, {".env": "TOKEN=1", "deploy/id_rsa": "x", "deploy/notes.txt": KEY, ".env.example": "TOKEN="})
    git(repository, "add", "-Af")
    code = read_code(repository, repository)
    assert names(code) == [".env.example", ".gitignore", "lib/a.py", "train.py"]
    assert [note.message for note in code.notes] == [
        ".env is left out: its name suggests that it holds a secret",
        "deploy/id_rsa is left out: its name suggests that it holds a secret",
        "deploy/notes.txt is left out: it holds a private key",
    ]


SECRETS = """.env .env.local prod.env a/.netrc server.pem tls.KEY id_ed25519 .ssh/config x/.aws/y .git-credentials
gcp-credentials.json secrets.yaml .npmrc .pypirc hf_token .token token.txt"""
HARMLESS = """env.py environment.yaml tokenizer.json special_tokens_map.json key.py secrets.py token.py .env.example
id_rsa.pub credentials.py monkey envs/a.py"""


def test_a_directory_that_is_not_copied_whole_is_not_the_copys(repository: Path) -> None:
    write(repository, {"data/dataset_info.json": "{}", "data/large.log": "x", "models/tiny/config.json": "{}"})
    write(repository, {"models/tiny/__pycache__/x.pyc": "x", "own/.env": "x", "own/a": "a"})
    git(repository, "config", "core.excludesFile", str(repository / ".git" / "mine"))
    (repository / ".git" / "mine").write_text("__pycache__\n")
    code = read_code(repository, repository)
    assert [
        code.holds(path) for path in ("data", "data/dataset_info.json", "models/tiny", "models", "own", "own/a")
    ] == [*(False, True, True, True, False, True)]


@pytest.mark.parametrize("name", SECRETS.split())
def test_names_that_mean_a_secret(name: str) -> None:
    assert is_secret_file(name)


@pytest.mark.parametrize("name", HARMLESS.split())
def test_names_that_mean_none(name: str) -> None:
    assert not is_secret_file(name)


def test_executable_bits_names_of_two_lines_and_links(repository: Path, tmp_path: Path) -> None:
    (repository / "run.sh").write_text("#!/bin/sh\n")
    (repository / "run.sh").chmod(0o755)
    (repository / "two\nlines.py").write_text("x")
    (repository / "inside").symlink_to("lib/a.py")
    (repository / "folder").symlink_to(repository / "lib")
    (repository / "lib" / "up").symlink_to("../train.py")
    (tmp_path / "data").mkdir()
    (repository / "data").symlink_to("../data")
    (repository / "round").symlink_to("folder/../../data")
    os.mkfifo(repository / "pipe")
    code = read_code(repository, repository)
    assert [file.path for file in code.files if file.is_executable] == ["run.sh"]
    assert "two\nlines.py" in names(code)
    assert code.links == {"folder": "lib", "inside": "lib/a.py", "lib/up": "../train.py"}
    assert [note.message for note in code.notes] == [
        f"data is left out: it points outside the directory, to {tmp_path}/data",
        f"round is left out: it points outside the directory, to {tmp_path}/data",
    ]
    assert code.notes[1].figures == {"path": "round", "target": f"{tmp_path}/data"}
    assert code.holds("inside")


def test_what_the_manifest_of_a_copy_would_refuse_is_written_otherwise_or_left_out(repository: Path) -> None:
    (repository / "around").symlink_to(f"../{repository.name}/train.py")
    (repository / "lib" / "back").symlink_to("../lib/../train.py")
    (repository / ".data.multinode-copy").mkdir()
    (repository / ".data.multinode-copy" / "staged").write_text("half")
    code = read_code(repository, repository)
    assert code.links == {"around": "train.py", "lib/back": "../train.py"}
    assert [note.message for note in code.notes] == [
        ".data.multinode-copy/staged is left out: it belongs to an unfinished copy made by multinode"
    ]
    manifest = Manifest(code.manifest)
    assert [file.name for file in manifest.files] == names(code)
    assert {name: text for _, name, text in manifest.links} == code.links
    assert manifest.size_bytes == code.size_bytes


def test_a_directory_that_has_become_a_link_is_a_link_alone(repository: Path) -> None:
    write(repository, {"elsewhere/a.py": "a"})
    (repository / "lib" / "a.py").unlink()
    (repository / "lib").rmdir()
    (repository / "lib").symlink_to("elsewhere")
    code = read_code(repository, repository)
    assert (names(code), code.links) == ([".gitignore", "elsewhere/a.py", "train.py"], {"lib": "elsewhere"})


def test_a_name_that_is_no_utf8_is_left_out(repository: Path) -> None:
    (Path(os.fsdecode(os.fsencode(repository) + b"/\xff.py"))).write_text("x")
    code = read_code(repository, repository)
    assert names(code) == [".gitignore", "lib/a.py", "train.py"]
    assert [note.message.endswith("is left out: its name is not UTF-8") for note in code.notes] == [True]


def test_submodules_and_repositories_inside_are_copied_and_one_without_a_checkout_is_told(
    repository: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    write(other, {"module.py": "m", ".gitignore": "ignored"})
    git(other, "add", "-A")
    git(other, "commit", "-qm", "all")
    git(repository, "submodule", "add", "-q", str(other), "vendor/there")
    git(repository, "submodule", "add", "-q", str(other), "vendor/absent")
    git(repository, "submodule", "deinit", "-f", "vendor/absent")
    git(tmp_path, "clone", "-q", str(other), str(repository / "cloned"))
    write(repository, {"vendor/there/ignored": "x", "vendor/there/new.py": "n"})
    code = read_code(repository, repository)
    assert [name for name in names(code) if "/" in name and not name.startswith("lib")] == [
        *("cloned/.gitignore", "cloned/module.py"),
        *("vendor/there/.gitignore", "vendor/there/module.py", "vendor/there/new.py"),
    ]
    assert [(note.message, note.hint) for note in code.notes] == [
        ("vendor/absent is left out: it is a submodule that is not checked out", "git submodule update --init")
    ]


def test_a_pointer_of_lfs_is_copied_as_one_and_told(repository: Path) -> None:
    write(repository, {"weights.bin": POINTER})
    code = read_code(repository, repository)
    assert "weights.bin" in names(code)
    assert [(note.message, note.hint) for note in code.notes] == [
        (
            "weights.bin is a Git LFS pointer; it is copied without the content of the file",
            "to get the content: git lfs pull",
        )
    ]


def test_the_runs_of_this_machine_are_no_code(repository: Path, tmp_path: Path) -> None:
    write(repository, {"runs/r1/log": "x", "runs_too": "x"})
    code = read_code(repository, repository, without=[repository / "runs", tmp_path / "elsewhere"])
    assert names(code) == [".gitignore", "lib/a.py", "runs_too", "train.py"]


def test_without_git_all_is_copied_but_what_no_job_reads(folder: Path) -> None:
    write(folder, {"train.py": "1", "lib/a.py": "a", "lib/__pycache__/a.pyc": "x", ".venv/x": "x", "my/pyvenv.cfg": ""})
    write(folder, {"my/lib": "x", "node_modules/x": "x", "checkpoint.py": "c", ".env": "x"})
    (folder / "checkpoint-50").mkdir()
    (folder / "checkpoint-50" / "model").write_text("x")
    (folder / "linked").symlink_to("lib")
    code = read_code(folder, folder)
    assert (names(code), code.links) == (["checkpoint.py", "lib/a.py", "train.py"], {"linked": "lib"})
    assert [(note.code, note.figures) for note in code.notes] == [("secret-name", {"path": ".env"})]


def test_what_is_no_code_is_refused(tmp_path: Path, golden: Golden) -> None:
    def refusal(name: str, of: str = ".") -> MultinodeError:
        return error_of(read_code, tmp_path / name / of, tmp_path / name)

    write(tmp_path, {"file/train.yaml": "x"})
    for name in ("large", "large-in-git"):
        write(tmp_path / name, {"train.py": "1", "model.safetensors": ""})
        os.truncate(tmp_path / name / "model.safetensors", 300 << 20)
    git(tmp_path / "large-in-git", "init", "-q")
    (tmp_path / "empty").mkdir()
    golden.check_errors(
        "refused_code",
        {
            "a model beside the code": refusal("large"),
            "a model beside the code, in git": refusal("large-in-git"),
            "a file": refusal("file", "train.yaml"),
            "nothing": refusal("empty", "absent"),
            "an empty directory": refusal("empty"),
        },
        tmp_path,
    )


def test_a_checkout_that_git_cannot_read_is_not_copied_with_its_secrets(folder: Path) -> None:
    """The words are git's."""
    (folder / ".git").mkdir()
    write(folder, {"train.py": "1", "ignored": "x"})
    error = error_of(read_code, folder, folder)
    assert error.message.startswith(f"--copy-code {folder}: git cannot tell which files it ignores: fatal: ")
    assert error.hint == f"git -C {folder} status"


def test_variables_of_a_hook_name_no_other_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert names(read_code(repository, repository)) == [".gitignore", "lib/a.py", "train.py"]


def test_the_digest_is_of_names_kinds_and_content(repository: Path) -> None:
    def digest() -> str:
        return read_code(repository, repository).digest

    seen = [digest()]
    assert digest() == seen[0]
    (repository / "train.py").chmod(0o755)
    seen.append(digest())
    (repository / "train.py").write_text("print(2)")
    seen.append(digest())
    (repository / "train.py").rename(repository / "other.py")
    seen.append(digest())
    (repository / "train.py").symlink_to("other.py")
    seen.append(digest())
    assert len(set(seen)) == len(seen)
