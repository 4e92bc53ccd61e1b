"""The rule for every test: leave the environment and the working directory as they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long this machine takes for an example says nothing about the code: other work shares it.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

_PYTEST_OWN = "PYTEST_"

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def leave_as_found() -> Iterator[None]:
    """Fail a test that changes the environment or the working directory, and put both back for those after it."""
    environ, cwd = _environ(), Path.cwd()
    yield
    changed = sorted(name for name, _ in environ.items() ^ _environ().items())
    moved_to = _cwd()
    for name in changed:
        os.environ.pop(name, None)
        if name in environ:
            os.environ[name] = environ[name]
    os.chdir(cwd)
    if changed:
        pytest.fail(f"the test changed the environment and did not put it back: {', '.join(dict.fromkeys(changed))}")
    if moved_to != cwd:
        pytest.fail(f"the test changed the working directory to {moved_to}")


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_PYTEST_OWN)}


def _cwd() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None
