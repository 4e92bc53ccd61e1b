from __future__ import annotations

from pathlib import Path

import pytest

from multinode.errors import UsageError
from multinode.records.settings import Defaults, Settings, default_job, find_fan_out, find_ssh_client, load_settings


def complaint(folder: Path, text: str) -> str:
    (folder / "multinode.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_settings(folder)
    assert str(caught.value).startswith(f"{folder}/multinode.toml: ")
    return str(caught.value)


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


def test_a_misspelt_key_is_named_with_its_table(tmp_path: Path) -> None:
    assert "unknown field `hots` - at `$.defaults`" in complaint(tmp_path, '[defaults]\nhots = "x"\n')
    assert "unknown field `default`" in complaint(tmp_path, '[default]\nhosts = "x"\n')


def test_a_value_of_another_type_is_named_with_its_place(tmp_path: Path) -> None:
    assert "`$.defaults.hosts`" in complaint(tmp_path, "[defaults]\nhosts = 3\n")


@pytest.mark.parametrize("text", ["[defaults\n", "hosts", "a = 1\na = 2\n", "a = " + "9" * 5000, "a = " + "[" * 5000])
def test_what_is_not_toml_is_one_error(tmp_path: Path, text: str) -> None:
    complaint(tmp_path, text)


def test_settings_that_cannot_be_read_are_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "multinode.toml").mkdir()
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load_settings(tmp_path)


def test_the_job_of_the_settings_wins_over_the_one_in_configs(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/default.yaml").touch()
    settings = Settings(defaults=Defaults(job="~/train.yaml"))
    assert default_job(settings, tmp_path) == Path.home() / "train.yaml"
    assert default_job(Settings(), tmp_path) == Path("configs/default.yaml")


def test_without_a_default_job_the_error_lists_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    for name in ("b.yaml", "a.yaml", "notes.txt"):
        (tmp_path / "configs" / name).touch()
    with pytest.raises(UsageError, match="no job was given") as caught:
        default_job(Settings(), tmp_path)
    assert caught.value.hint == "name one: configs/a.yaml, configs/b.yaml"


def test_without_any_configuration_the_error_says_what_a_job_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no job was given") as caught:
        default_job(Settings(), tmp_path)
    assert caught.value.hint == "name one: a LLaMA-Factory YAML, or -- train.py"


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


@pytest.mark.parametrize("text", ["0", "many", "1025", "1.5"])
def test_a_fan_out_that_is_no_number_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"\$MULTINODE_FAN_OUT is .* expected a number of nodes, 1 to 1024"):
        find_fan_out({"MULTINODE_FAN_OUT": text}, Settings())


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, "fabric"), ({"MULTINODE_SSH": ""}, "fabric"), ({"MULTINODE_SSH": "openssh"}, "openssh")],
)
def test_what_connects_is_that_of_the_variable_or_the_settings(environ: dict[str, str], expected: str) -> None:
    assert find_ssh_client(environ, Settings(defaults=Defaults(ssh="fabric"))) == expected
    assert find_ssh_client({}, Settings()) is None
    with pytest.raises(UsageError, match=r"\$MULTINODE_SSH is 'putty': expected openssh or fabric"):
        find_ssh_client({"MULTINODE_SSH": "putty"}, Settings())


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
    with pytest.raises(UsageError, match=rf"^{tmp_path}/multinode.toml: .*`\$.hosts"):
        load_settings(tmp_path / "elsewhere")
