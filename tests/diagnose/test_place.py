from __future__ import annotations

import pytest

from multinode.diagnose.place import raised_at, stands_at

CHAINED = """[rank1]: Traceback (most recent call last):
[rank1]:   File "/data/other.py", line 3, in first
[rank1]:     raise ValueError(1)
[rank1]: ValueError: 1

[rank1]: During handling of the above exception, another exception occurred:

[rank1]: Traceback (most recent call last):
[rank1]:   File "/data/train.py", line 9, in <module>
[rank1]:     model(batch)
[rank1]:   File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1553, in _call_impl
[rank1]:     return forward_call(*args, **kwargs)
[rank1]: torch.OutOfMemoryError: CUDA out of memory.
"""
OF_A_LIBRARY = """Traceback (most recent call last):
  File "/v/lib/python3.11/site-packages/llamafactory/cli.py", line 7, in main
    run()
"""
NO_SYNTAX = """  File "/a/train.py", line 3
    def f(:
          ^
SyntaxError: invalid syntax
"""
REFUSED = "usage: t.py [-h]\nt.py: error: the following arguments are required: --data\n"


@pytest.mark.parametrize(
    ("traceback", "sentence", "code"),
    [
        (CHAINED, "your script, train.py:9", "model(batch)"),
        (OF_A_LIBRARY, "llamafactory/cli.py:7", "run()"),
        (NO_SYNTAX, "your script, train.py:3", "def f(:"),
        (REFUSED, "your script, t.py", "the following arguments are required: --data"),
    ],
)
def test_the_place_of_an_error_is_the_users_own_line_where_there_is_one(
    traceback: str, sentence: str, code: str
) -> None:
    place = raised_at(traceback)
    assert place is not None
    assert (place.sentence, place.code) == (sentence, code)


@pytest.mark.parametrize("text", ["", "error: all is lost", 'File "train.py"', "train: error: x"])
def test_what_is_no_traceback_has_no_place(text: str) -> None:
    assert raised_at(text) is None
    assert stands_at(text) is None
