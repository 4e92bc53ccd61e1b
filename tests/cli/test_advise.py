from __future__ import annotations

import pytest
from typer.testing import CliRunner

from multinode.cli.main import build_app
from multinode.errors import UsageError


@pytest.mark.parametrize("rate", ["0", "1bit", "1000tbit", "nan", "fast"])
@pytest.mark.parametrize("option", ["--link", "--link-measured"])
def test_a_link_that_cannot_be_is_refused(option: str, rate: str) -> None:
    result = CliRunner().invoke(build_app(), ["advise", option, rate])
    assert isinstance(result.exception, UsageError)
    assert result.exception.message.startswith(option)


@pytest.mark.parametrize("option", ["--try", "--pick", "--job", "--repeats"])
def test_what_tried_changes_says_what_does_now(option: str) -> None:
    result = CliRunner().invoke(build_app(), ["advise", option, "2"])
    assert isinstance(result.exception, UsageError)
    assert result.exception.hint == "multinode tune --judge speed --from RUN measures the advised changes"
