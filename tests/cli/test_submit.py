from __future__ import annotations

import pytest

from multinode.cli.submit import batch_script
from tests.golden import Golden, error_of


def script(options: str, *command: str) -> str:
    return batch_script(options.split(), command, python="/venv/bin/python", runs="/home/me/my runs")


def test_the_script_is_short_enough_to_be_read() -> None:
    text = script("-N2 --gpus-per-node=4 -t 1:00:00", "launch", "job.yaml", "--set", "a=b c")
    assert text == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=multinode\n"
        "#SBATCH -N2\n"
        "#SBATCH --gpus-per-node=4\n"
        "#SBATCH -t 1:00:00\n"
        "#SBATCH --signal=B:TERM@70\n"
        "# The shell becomes the controller, so that Slurm's SIGTERM before the time limit stops the run cleanly.\n"
        "export MULTINODE_RUNS='/home/me/my runs'\n"
        "exec /venv/bin/python -m multinode launch --hosts auto job.yaml --set 'a=b c'\n"
    )


@pytest.mark.parametrize(
    ("options", "command", "line"),
    [
        ("-N2", ("launch", "--grace-period", "90.5"), "#SBATCH --signal=B:TERM@151\n"),
        ("-N2", ("launch", "--grace-period=5"), "#SBATCH --signal=B:TERM@65\n"),
        # After -- it is the script's own.
        ("-N2", ("launch", "--", "t.py", "--grace-period", "90"), "#SBATCH --signal=B:TERM@70\n"),
        ("-N2 --signal=B:USR1@30", ("launch",), "#SBATCH --signal=B:USR1@30\n"),
        ("-J mine", ("nccl-test",), "#SBATCH -J mine\n"),
        ("--comment=$(reboot)", ("check",), "#SBATCH --comment='$(reboot)'\n"),
    ],
)
def test_what_the_user_says_comes_first(options: str, command: tuple[str, ...], line: str) -> None:
    text = script(options, *command)
    assert line in text
    assert text.count("--signal") == 1
    assert text.count("--job-name") + text.count("-J ") == 1


def test_what_cannot_be_submitted_is_refused_and_no_secret_told(golden: Golden) -> None:
    commands = ("-N2", "-N2 lab up", "-N2 launch --hosts mine", "-N2 launch --hosts=mine", "2 launch")
    errors = {line: error_of(script, *line.split()) for line in commands}
    errors["a secret"] = error_of(script, "-N2", "launch", "--env", "HF_TOKEN=s3cret")
    errors["a line break"] = error_of(batch_script, ("--comment=a\nreboot",), ("launch",), python="p", runs="r")
    golden.check_errors("refused_submit", errors)
