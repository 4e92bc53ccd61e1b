from __future__ import annotations

from pathlib import Path

import pytest

from multinode.errors import MultinodeError
from multinode.records.settings import Defaults, Settings, default_job, find_fan_out, find_ssh_client, load_settings
from tests.golden import Golden, error_of


def test_a_directory_without_settings_has_empty_ones(tmp_path: Path) -> None:
    assert load_settings(tmp_path) == Settings()


def test_the_defaults_are_read(tmp_path: Path) -> None:
    (tmp_path / "multinode.toml").write_text('[defaults]\nhosts = "lab"\njob = "train.yaml"\n')
    assert load_settings(tmp_path).defaults == Defaults(hosts="lab", job="train.yaml")


@pytest.mark.parametrize("key", ["setup", "prelude"])
def test_a_setup_may_have_several_lines_and_its_former_name(tmp_path: Path, key: str) -> None:
    text = "module load cuda\nconda activate train\n"
    (tmp_path / "multinode.toml").write_text(f'[defaults]\n{key} = """\n{text}"""\n')
    assert load_settings(tmp_path).defaults == Defaults(setup=text)


def test_wrong_settings_are_refused_with_their_place(tmp_path: Path, golden: Golden) -> None:
    def refusal(text: str) -> MultinodeError:
        (tmp_path / "multinode.toml").write_text(text)
        return error_of(load_settings, tmp_path)

    texts = ('[defaults]\nhots = "x"\n', '[default]\nhosts = "x"\n', "[defaults]\nhosts = 3\n", "[hosts]\npair = 3\n")
    (tmp_path / "folder" / "multinode.toml").mkdir(parents=True)
    golden.check_errors(
        "refused_settings",
        {repr(text): refusal(text) for text in texts}
        | {"a directory": error_of(load_settings, tmp_path / "folder")}
        | {
            f"$MULTINODE_FAN_OUT={text}": error_of(find_fan_out, {"MULTINODE_FAN_OUT": text}, Settings())
            for text in ("0", "many", "1025", "1.5")
        }
        | {"$MULTINODE_SSH=putty": error_of(find_ssh_client, {"MULTINODE_SSH": "putty"}, Settings())},
        tmp_path,
    )


@pytest.mark.parametrize("text", ["[defaults\n", "hosts", "a = 1\na = 2\n", "a = " + "9" * 5000, "a = " + "[" * 5000])
def test_what_is_not_toml_is_refused_with_its_file(tmp_path: Path, text: str) -> None:
    """The words are the parser's."""
    (tmp_path / "multinode.toml").write_text(text)
    assert error_of(load_settings, tmp_path).message.startswith(f"{tmp_path}/multinode.toml: ")


def test_the_job_of_the_settings_wins_over_the_one_in_configs(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/default.yaml").touch()
    settings = Settings(defaults=Defaults(job="~/train.yaml"))
    assert default_job(settings, tmp_path) == Path.home() / "train.yaml"
    assert default_job(Settings(), tmp_path) == Path("configs/default.yaml")


def test_without_a_default_job_the_error_lists_what_is_there(tmp_path: Path, golden: Golden) -> None:
    refused = {"no configs/": error_of(default_job, Settings(), tmp_path)}
    (tmp_path / "configs").mkdir()
    for name in ("b.yaml", "a.yaml", "notes.txt"):
        (tmp_path / "configs" / name).touch()
    golden.check_errors("refused_no_job", refused | {"configs/": error_of(default_job, Settings(), tmp_path)})


def test_a_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    (tmp_path / "multinode.toml").write_text('[defaults]\nhosts = "lab"\n')
    first = load_settings(tmp_path)
    assert load_settings(tmp_path) is first
    (tmp_path / "multinode.toml").write_text('[defaults]\nhosts = "nodes.txt"\n')
    assert load_settings(tmp_path).defaults.hosts == "nodes.txt"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, 32), ({"MULTINODE_FAN_OUT": ""}, 32), ({"MULTINODE_FAN_OUT": "64"}, 64)],
)
def test_the_fan_out_is_that_of_the_variable_or_the_settings(environ: dict[str, str], expected: int) -> None:
    assert find_fan_out(environ, Settings(defaults=Defaults(fan_out=32))) == expected
    assert find_fan_out({}, Settings()) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, "fabric"), ({"MULTINODE_SSH": ""}, "fabric"), ({"MULTINODE_SSH": "openssh"}, "openssh")],
)
def test_what_connects_is_that_of_the_variable_or_the_settings(environ: dict[str, str], expected: str) -> None:
    assert find_ssh_client(environ, Settings(defaults=Defaults(ssh="fabric"))) == expected
    assert find_ssh_client({}, Settings()) is None


USER = """
[defaults]
hosts = "@pair"
ssh = "fabric"

[hosts]
pair = "gpu-a:2,gpu-b:2"
lab2 = "/srv/hosts.txt"
"""


@pytest.mark.parametrize("variable", ["XDG_CONFIG_HOME", "HOME"])
def test_the_settings_of_a_directory_are_over_those_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "home"))
    folder = tmp_path / "home" / ("" if variable == "XDG_CONFIG_HOME" else ".config")
    folder.mkdir(parents=True)
    (folder / "multinode.toml").write_text(USER)
    work = tmp_path / "work"
    work.mkdir()
    alone = load_settings(work)
    assert (alone.defaults, alone.hosts_file) == (
        Defaults(hosts="@pair", ssh="fabric"),
        str(folder / "multinode.toml"),
    )
    (work / "multinode.toml").write_text('[defaults]\nhosts = "hosts.txt"\n[hosts]\nlab2 = "other.txt"\n')
    both = load_settings(work)
    assert (both.defaults, both.hosts_file) == (Defaults(hosts="hosts.txt", ssh="fabric"), "multinode.toml")
    assert both.hosts == {"pair": "gpu-a:2,gpu-b:2", "lab2": "other.txt"}


def test_what_is_wrong_in_the_settings_of_the_user_is_told_with_their_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "multinode.toml").write_text("[hosts]\npair = 3\n")
    assert error_of(load_settings, tmp_path / "elsewhere").message.startswith(f"{tmp_path}/multinode.toml: ")
