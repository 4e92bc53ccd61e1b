"""Cause and fix of known errors in the language of $MULTINODE_LANG."""

from __future__ import annotations

import msgspec
import pytest

from multinode.diagnose.failure import classify
from multinode.diagnose.known_errors import known_errors
from multinode.diagnose.translation import chinese_meanings, translate
from multinode.records.run import Failure

CHINESE = {"MULTINODE_LANG": "zh"}
BUS_ERROR = classify(
    Failure(node="gpu-a", node_rank=0, message="DataLoader worker (pid 4711) is killed by signal: Bus error")
)


@pytest.mark.parametrize("name", known_errors())
def test_every_known_error_is_shown_in_chinese_with_its_node(name: str) -> None:
    error, chinese = known_errors()[name], chinese_meanings()[name]
    failure = msgspec.structs.replace(BUS_ERROR, error_id=name, cause=error.cause, hint=error.fix_on("gpu-a"))
    shown = translate(failure, CHINESE)
    assert (shown.cause, shown.hint) == (chinese.cause, chinese.fix.format(node="gpu-a"))
    assert not chinese.cause.isascii()


@pytest.mark.parametrize("environ", [{}, {"MULTINODE_LANG": "en"}, {"LANG": "zh_CN.UTF-8"}])
def test_without_the_variable_the_texts_are_english(environ: dict[str, str]) -> None:
    assert translate(BUS_ERROR, environ) == BUS_ERROR


def test_a_hint_that_is_not_the_catalogues_stays() -> None:
    own = msgspec.structs.replace(BUS_ERROR, hint="ask the administrator of gpu-a")
    shown = translate(own, CHINESE)
    assert (shown.cause, shown.hint) == (chinese_meanings()["bus-error"].cause, own.hint)


def test_a_failure_that_is_not_in_the_catalogue_stays() -> None:
    unknown = Failure(node="gpu-a", node_rank=0, message="KeyError: 'weight_decay'", hint="see train.py")
    assert translate(unknown, CHINESE) == unknown
