from __future__ import annotations

from pathlib import Path

import pytest

_RULE = (Path(__file__).parent / "conftest.py").read_text()


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("os.environ['LEFT_BEHIND'] = '1'", "*changed the environment*: LEFT_BEHIND"),
        ("os.environ['HOME'] = '/nowhere'", "*changed the environment*: HOME"),
        ("del os.environ['HOME']", "*changed the environment*: HOME"),
        ("os.chdir('/')", "*changed the working directory to /"),
    ],
)
def test_a_test_that_leaves_something_changed_fails_and_the_next_one_does_not(
    pytester: pytest.Pytester, body: str, complaint: str
) -> None:
    pytester.makeconftest(_RULE)
    pytester.makepyfile(f"import os\n\ndef test_careless():\n    {body}\n\ndef test_next():\n    pass\n")
    result = pytester.runpytest_subprocess("-p", "no:randomly")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines([complaint])
