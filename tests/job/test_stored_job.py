from __future__ import annotations

from pathlib import Path

import pytest

from multinode.errors import MultinodeError
from multinode.job.deepspeed import parse_deepspeed_edits
from multinode.job.job import ScriptJob, job_paths
from multinode.job.job_files import load_job, load_script
from multinode.job.restrictions import node_groups_of
from tests.golden import Golden, error_of

TRAINING = "model_name_or_path: models/tiny\nstage: sft\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a job in configs/."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_job_is_read_with_its_overrides(folder: Path) -> None:
    write(folder / "configs/sft.yaml", TRAINING)
    job = load_job(Path("configs/sft.yaml"), ("max_steps=5",))
    assert (job.config_path, job.text) == ("configs/sft.yaml", TRAINING)
    assert job.config == {"model_name_or_path": "models/tiny", "stage": "sft", "max_steps": 5}
    assert job.overridden == ("max_steps",)
    assert job.deepspeed_text is None


def test_a_model_that_lies_here_is_a_path_and_another_a_name_of_the_hub(folder: Path) -> None:
    path = write(folder / "configs/sft.yaml", TRAINING)
    assert job_paths(load_job(path)) == ()
    (folder / "models/tiny").mkdir(parents=True)
    assert job_paths(load_job(path)) == ("models/tiny",)


def test_the_deepspeed_configuration_is_looked_for_where_llamafactory_does_then_beside_the_yaml(folder: Path) -> None:
    path = write(folder / "configs/sft.yaml", TRAINING + "deepspeed: ds.json\n")
    write(folder / "configs/ds.json", '{"beside": "the yaml"}')
    assert load_job(path).deepspeed_text == '{"beside": "the yaml"}'
    write(folder / "ds.json", '{"from": "here"}')
    assert load_job(path).deepspeed_text == '{"from": "here"}'


def test_a_deepspeed_configuration_can_be_overridden_or_taken_away(folder: Path) -> None:
    path = write(folder / "sft.yaml", TRAINING + "deepspeed: gone.json\n")
    write(folder / "other.json", "{}")
    assert load_job(path, ("deepspeed=other.json",)).deepspeed_text == "{}"
    assert load_job(path, ("deepspeed=null",)).deepspeed_text is None


def test_an_edit_is_for_this_run_alone_and_is_shown(folder: Path) -> None:
    write(folder / "configs/sft.yaml", TRAINING + "deepspeed: ds.json\n")
    path = Path("configs/sft.yaml")
    named = write(folder / "configs/ds.json", '{\n  "zero_optimization": {"stage": 3}\n}\n')
    job = load_job(path, (), parse_deepspeed_edits(["zero_optimization.stage=2"]))
    assert job.deepspeed_text == '{\n  "zero_optimization": {\n    "stage": 2\n  }\n}\n'
    assert str(job.deepspeed_diff).split("\n") == [
        "--- configs/ds.json",
        "+++ configs/ds.json\tfor this run only",
        "@@ -1,5 +1,5 @@",
        " {",
        '   "zero_optimization": {',
        '-    "stage": 3',
        '+    "stage": 2',
        "   }",
        " }",
    ]
    assert named.read_text() == '{\n  "zero_optimization": {"stage": 3}\n}\n'
    assert load_job(path).deepspeed_diff is None


def test_what_cannot_be_read_is_refused_with_the_file_that_names_it(folder: Path, golden: Golden) -> None:
    def refusal(yaml: str, *overrides: str, content: str = "{}", edit: str = "") -> MultinodeError:
        write(folder / "ds.json", content)
        path = write(folder / "sft.yaml", TRAINING + yaml)
        return error_of(load_job, path, overrides, parse_deepspeed_edits([edit] if edit else []))

    named = ("gone.json", "configs", '"a\\0b"')
    contents = ("", "[1]", '{"a": 1,}', "[" * 100_000)
    half = "fp16.enabled=true"
    golden.check_errors(
        "refused_files",
        {
            "--deepspeed-set, no JSON": refusal("", edit=half),
            "--deepspeed-set, deepspeed=null": refusal("deepspeed: ds.json\n", "deepspeed=null", edit=half),
            "--deepspeed-set, in the YAML": refusal("deepspeed: {zero_optimization: {stage: 2}}\n", edit=half),
            "no YAML": error_of(load_job, folder / "gone.yaml"),
            "a name of 300 letters": refusal(f"deepspeed: {'x' * 300}\n"),
        }
        | {f"deepspeed: {name}": refusal(f"deepspeed: {name}\n") for name in named}
        | {f"ds.json: {text[:9]}": refusal("deepspeed: ds.json\n", content=text) for text in contents},
        folder,
    )


def test_settings_of_deepspeed_within_the_yaml_travel_with_it(folder: Path) -> None:
    path = write(folder / "sft.yaml", TRAINING + "deepspeed: {zero_optimization: {stage: 2}}\n")
    assert load_job(path).deepspeed_text is None


def test_text_that_cannot_be_a_path_is_no_path(folder: Path) -> None:
    long = "x" * 5000
    path = write(folder / "sft.yaml", f'model_name_or_path: "a\\0b"\nstage: sft\nmedia_dir: {long}\n')
    assert job_paths(load_job(path)) == ()


@pytest.mark.parametrize("options", [("--deepspeed", "{}"), ("--lr=1", "--deepspeed_config={}"), ("--deepspeed={}",)])
def test_the_deepspeed_json_of_a_script_is_read_where_it_is_here(tmp_path: Path, options: tuple[str, ...]) -> None:
    path = tmp_path / "ds.json"
    argv = ("train.py", *(option.format(path) for option in options))
    assert load_script(ScriptJob(argv=argv)) == ScriptJob(argv=argv)
    path.write_text('{"zero_optimization": {"mics_shard_size": 4}}')
    job = load_script(ScriptJob(argv=argv))
    assert job == ScriptJob(argv=argv, local_paths=(str(path),), deepspeed_text=path.read_text())
    assert node_groups_of(job, {}, {}) == "mics_shard_size: 4"


def test_a_script_that_names_no_json_has_none() -> None:
    for argv in (("train.py",), ("train.py", "--deepspeed"), ("train.py", "--deepspeed", "a\0b")):
        assert load_script(ScriptJob(argv=argv)).deepspeed_text is None


def test_the_launchers_options_may_name_the_json(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    script = ScriptJob(argv=("train.py",), options=("--deepspeed_config_file", str(tmp_path / "ds.json")))
    assert load_script(script).deepspeed_text == "{}"
