from __future__ import annotations

import pytest

from multinode.cluster.cluster import Node
from multinode.errors import UsageError
from multinode.job.job import JobEnvironment, parse_job_environment, with_same_threads
from tests import make


def test_a_name_alone_is_forwarded_and_a_pair_is_taken_as_it_stands() -> None:
    found = parse_job_environment(["HF_TOKEN", "A=b=c", "EMPTY="], None, {"HF_TOKEN": "t", "A": "other"})
    assert found == JobEnvironment(env={"HF_TOKEN": "t", "A": "b=c", "EMPTY": ""}, forwarded=("HF_TOKEN",))


def test_the_last_of_a_name_counts_and_so_does_how_it_was_given() -> None:
    environ = {"A": "here"}
    assert parse_job_environment(["A", "A=typed"], None, environ) == JobEnvironment(env={"A": "typed"})
    assert parse_job_environment(["A=typed", "A"], None, environ) == JobEnvironment(env={"A": "here"}, forwarded=("A",))


def test_a_name_that_is_not_set_here_is_an_error_and_one_that_is_set_to_nothing_is_not() -> None:
    with pytest.raises(UsageError, match="HF_TOKEN: the variable is not set here"):
        parse_job_environment(["HF_TOKEN"], None, {})
    assert parse_job_environment(["HF_TOKEN"], None, {"HF_TOKEN": ""}).env == {"HF_TOKEN": ""}


@pytest.mark.parametrize("text", ["", "=s3cret", "s3cret key", "1A=s3cret", "A-B=s3cret", "hf-s3cret"])
def test_what_is_no_variable_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(UsageError, match="needs NAME or NAME=VALUE") as caught:
        parse_job_environment([text], None, {})
    assert "s3cret" not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize("prelude", [None, "", " \n"])
def test_an_empty_prelude_is_none(prelude: str | None) -> None:
    assert parse_job_environment([], prelude, {}).prelude is None


def test_what_no_process_can_be_handed_is_refused() -> None:
    with pytest.raises(UsageError, match="NUL"):
        parse_job_environment(["A=b\0"], None, {})
    with pytest.raises(UsageError, match="NUL"):
        parse_job_environment([], "a\0b", {})


def test_runs_that_are_compared_have_as_many_threads_a_worker() -> None:
    bare = make.cluster("a", "b")
    # torchrun would give the two workers of the one run a thread each, and the one worker of the other all cores.
    assert with_same_threads(JobEnvironment(env={"A": "b"}), bare, [2, 1]).env == {"A": "b", "OMP_NUM_THREADS": "1"}
    assert with_same_threads(JobEnvironment(), bare, [1, 1]) == JobEnvironment()


def test_threads_that_somebody_has_set_stay() -> None:
    bare = make.cluster("a", "b")
    typed = JobEnvironment(env={"OMP_NUM_THREADS": "8"})
    assert with_same_threads(typed, bare, [2, 1]) == typed
    set_there = make.cluster(Node(name="a", env={"OMP_NUM_THREADS": "4"}))
    assert with_same_threads(JobEnvironment(), set_there, [2, 1]) == JobEnvironment()
