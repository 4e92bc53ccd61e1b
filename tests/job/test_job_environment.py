from __future__ import annotations

import pytest

from multinode.cluster.cluster import Node
from multinode.job.job import JobEnvironment, parse_job_environment, with_same_threads
from tests import make
from tests.golden import Golden, error_of


def test_a_name_alone_is_forwarded_and_a_pair_is_taken_as_it_stands() -> None:
    found = parse_job_environment(["HF_TOKEN", "A=b=c", "EMPTY="], None, {"HF_TOKEN": "t", "A": "other"})
    assert found == JobEnvironment(env={"HF_TOKEN": "t", "A": "b=c", "EMPTY": ""}, forwarded=("HF_TOKEN",))


def test_the_last_of_a_name_counts_and_so_does_how_it_was_given() -> None:
    environ = {"A": "here"}
    assert parse_job_environment(["A", "A=typed"], None, environ) == JobEnvironment(env={"A": "typed"})
    assert parse_job_environment(["A=typed", "A"], None, environ) == JobEnvironment(env={"A": "here"}, forwarded=("A",))


def test_a_name_that_is_set_to_nothing_is_forwarded() -> None:
    assert parse_job_environment(["HF_TOKEN"], None, {"HF_TOKEN": ""}).env == {"HF_TOKEN": ""}


def test_what_is_no_variable_is_refused_without_being_repeated(golden: Golden) -> None:
    wrong = ("", "=s3cret", "s3cret key", "1A=s3cret", "A-B=s3cret", "hf-s3cret", "A=b\0", "HF_TOKEN")
    refused = {ascii(text): error_of(parse_job_environment, [text], None, {}) for text in wrong}
    assert "s3cret" not in " ".join(f"{error} {error.hint}" for error in refused.values())
    golden.check_errors(
        "refused_variables", refused | {"--setup with NUL": error_of(parse_job_environment, [], "a\0b", {})}
    )


@pytest.mark.parametrize("prelude", [None, "", " \n"])
def test_an_empty_prelude_is_none(prelude: str | None) -> None:
    assert parse_job_environment([], prelude, {}).prelude is None


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
