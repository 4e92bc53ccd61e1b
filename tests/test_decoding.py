from __future__ import annotations

import subprocess
import sys

THREADS_AT_ONCE = """
import sys, threading, types
sys.setswitchinterval(1e-6)
from multinode.decoding import convert, decode_json

fields = "".join(f"    f{n}: int | str | None = None\\n" for n in range(20))
nested = "".join(f"    f{n}: tuple[Inner, ...] | None = None\\n" for n in range(20))
text = f"from __future__ import annotations\\nimport msgspec\\nclass Inner(msgspec.Struct):\\n{fields}"
text += f"class Outer(msgspec.Struct):\\n{nested}"
for n in range(40):
    module = types.ModuleType(f"types_{n}")
    sys.modules[module.__name__] = module
    exec(text, module.__dict__)
    barrier = threading.Barrier(4)

    def use(number):
        barrier.wait()
        if number % 2:
            assert convert({"f1": [{"f2": 1}]}, module.Outer).f1[0].f2 == 1
        else:
            assert decode_json('{"f2": "x"}', module.Inner).f2 == "x"

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("decoded")
"""


def test_threads_that_use_a_type_first_at_the_same_time_do_not_crash() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS_AT_ONCE], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout) == (0, "decoded\n"), done.stderr
