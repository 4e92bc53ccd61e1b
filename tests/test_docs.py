from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from multinode.check.check import CHECK_NAMES
from multinode.cli.verbs import VERBS
from multinode.diagnose.known_errors import find_error, known_errors

_ROOT = Path(__file__).parent.parent


def _run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, _ROOT / "scripts" / script, *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=600, check=False)


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("script", sorted(path.name for path in (_ROOT / "scripts").glob("make_*_reference.py")))
def test_a_generated_reference_is_current(script: str) -> None:
    checked = _run(script, "--check")
    assert checked.stdout == ""
    assert checked.returncode == 0


def test_the_documents_are_in_order() -> None:
    checked = _run("check_docs.py")
    assert checked.returncode == 0, checked.stdout
    assert re.fullmatch(r"[\d,]+ of 32,000 words by hand, .+\n", checked.stdout)


_TRANSLATE = """
import sys; sys.path.insert(0, "scripts")
import make_catalogue_reference as made
errors = {name: made.known_errors()[name] for name in ("bus-error", "timeout")}
waited = made.Meaning(cause="waited", fix="multinode check")
print(*made.check_translation(errors, {"timeout": waited, "gone": waited}), sep="\\n")
"""


def test_an_error_whose_translation_is_not_whole_is_named() -> None:
    command = [sys.executable, "-c", _TRANSLATE]
    said = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=600, check=True).stdout
    assert said.splitlines() == [
        "bus-error: it stands in the catalogue alone",
        "gone: it stands in Chinese alone",
        "timeout: the Chinese text differs in --hang-timeout",
    ]


_DECLARE = """
import sys; sys.path.insert(0, "scripts")
import make_finding_reference as made
from multinode.findings.rule import RuleGroup
group = RuleGroup("Speeds")
for _ in range(2):
    group.rule("slow", about="a slow node", message="It takes {step_ms:.1f} ms | more.", figures=("step_ms",))
print(*made.twice_declared([group, RuleGroup("Speeds")]), sep="\\n")
print(made.render_reference([group]).splitlines()[-1])
"""


def test_a_finding_is_declared_once_and_listed_with_its_figures() -> None:
    command = [sys.executable, "-c", _DECLARE]
    said = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=600, check=True).stdout
    assert said.splitlines() == [
        "2 groups of rules have the title 'Speeds'",
        "Speeds: 2 rules have the code slow",
        "| `slow` | a slow node | It takes {step_ms} ms \\| more. | - | `step_ms` |",
    ]


_HELD = """
import importlib, pkgutil
import multinode
from multinode.figures.figure import Figure
from multinode.findings.rule import Rule, RuleGroup
held = set()
def take(value):
    if isinstance(value, (Figure, Rule)):
        held.add(" ".join(value.about.split()))
    elif isinstance(value, (tuple, list, frozenset)):
        [take(one) for one in value]
    elif isinstance(value, dict):
        take(list(value.values()))
    elif isinstance(value, RuleGroup):
        take(value.rules)
for module in pkgutil.walk_packages(multinode.__path__, "multinode."):
    if not module.name.startswith(("multinode.node", "multinode.worker")) and not module.name.endswith("__main__"):
        take(vars(importlib.import_module(module.name)))
print(*sorted(held), sep="\\n")
"""
_REFERENCES = ("checks", "findings", "figures", "table-figures")


def test_every_figure_and_every_finding_is_in_its_reference_page() -> None:
    """Wherever a module holds one: the pages are made of those that are declared as usual."""
    command = [sys.executable, "-c", _HELD]
    held = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=600, check=True).stdout
    pages = [(_ROOT / "docs" / "reference" / f"{name}.md").read_text() for name in _REFERENCES]
    listed = {cell.strip() for page in pages for line in page.splitlines() for cell in re.split(r"(?<!\\)\|", line)}
    meanings = [about.replace("|", "\\|").replace("<", "&lt;") for about in held.splitlines()]
    assert [about for about in meanings if about not in listed] == []


_DECLARED = """
import sys; sys.path.insert(0, "scripts")
import make_figure_reference as made
from multinode.figures.figure import Figure
figures = {"speed": [Figure("speed", "speed", "km/h", csv="speed_km_per_h")]}
figures["way"] = [Figure("way", "way", about="a way")]
print(*made.undescribed(figures), sep="\\n")
print(*made.render_reference(figures).splitlines()[-2:], sep="\\n")
"""


def test_a_figure_says_what_it_means_and_is_listed() -> None:
    command = [sys.executable, "-c", _DECLARED]
    said = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=600, check=True).stdout
    assert said.splitlines() == [
        "the figure speed (speed) does not say what it means",
        "| speed | km/h | `speed`, in CSV `speed_km_per_h` |  |",
        "| way |  | `way` | a way |",
    ]


def test_the_words_are_the_fields() -> None:
    checked = _run("check_words.py")
    assert checked.stdout == ""
    assert checked.returncode == 0


def test_nothing_in_the_tree_is_unfinished() -> None:
    checked = _run("check_tree.py")
    assert checked.stdout == ""
    assert checked.returncode == 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[there](docs/gone.md)", "README.md:1: the link docs/gone.md leads nowhere"),
        ("[begun\nabove](docs/gone.md)", "README.md:2: the link docs/gone.md leads nowhere"),
        ("see [it].\n\n[it]: docs/gone.md", "README.md:3: the link docs/gone.md leads nowhere"),
        ("![a picture](docs/gone.svg)", "README.md:1: the link docs/gone.svg leads nowhere"),
        ('<img src="docs/gone.png">', "README.md:1: the link docs/gone.png leads nowhere"),
        ("[there](docs/a.md#gone)", "README.md:1: the link docs/a.md#gone names a heading that is not there"),
        ("# Title\n\n`multinode fly --hosts H`", "README.md:3: there is no command `multinode fly`"),
        ("```\nmultinode launch --fast\n```", "README.md:2: `multinode launch` has no option --fast"),
        ("    $ sudo multinode lab sideways", "README.md:1: there is no command `multinode lab sideways`"),
        ("as in `docs/b.md` or `docs/a.md`", "README.md:1: there is no docs/b.md"),
        ("`core/b.py` of `core/a.py`", "README.md:1: there is no core/b.py"),
        ("[s](docs/schemas/gone-1.json)", "README.md:1: the link docs/schemas/gone-1.json leads to no schema"),
    ],
)
def test_a_document_that_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    checked = _run(
        "check_docs.py", _tree(tmp_path, {"README.md": text, "docs/a.md": "# Here\n", "multinode/core/a.py": ""})
    )
    assert checked.returncode == 1
    assert f"{tmp_path}/{complaint}" in checked.stdout.splitlines()


@pytest.mark.parametrize(
    "text",
    [
        "[there](docs/a.md)",
        "[generated](docs/schemas/launch-2.json)",
        "[there](docs/a.md#some-heading-and-more)",
        "[elsewhere](https://example.org/page)",
        "```\n[not a link](in-code)\n```",
        "`multinode launch --hosts H --nodes 2 -- train.py --fast`",
        "```\nmultinode launch --set max_steps=5 # --not-ours\n```",
        "`docs/a.md`, `core/a.py` and `multinode/core/VERB.py`, but `samples/node.jsonl` in a run",
    ],
)
def test_a_document_that_is_right_is_not_complained_about(tmp_path: Path, text: str) -> None:
    files = {"README.md": text, "docs/a.md": "## Some heading, and more\n", "multinode/core/a.py": ""}
    checked = _run("check_docs.py", _tree(tmp_path, files))
    assert "README.md:" not in checked.stdout


def test_a_picture_that_is_too_large_is_named(tmp_path: Path) -> None:
    tree = _tree(tmp_path, {"README.md": "![a](docs/a.png)", "docs/a.png": "x" * 300_001})
    assert f"{tree}/README.md:1: the picture docs/a.png is larger than 300 kB" in _run("check_docs.py", tree).stdout


_ENGLISH = "# Title\n\n`multinode runs`\n\n## Part\n\n```\nmultinode show  # one run\n```\n"


@pytest.mark.parametrize(
    ("translated", "complaints"),
    [
        ("# T\n\nof `multinode runs`\n\n## P\n\n```\nmultinode show  # elsewhere\n```\n", []),
        (_ENGLISH + "\n[more](page.md)\n", ["the link that page.md has not: page.md"]),
        (_ENGLISH.replace("## ", "### "), ["its sections do not nest as those of page.md"]),
        (_ENGLISH.replace("show", "logs"), ["the code of page.md is not here: ", "the code that page.md "]),
        (_ENGLISH.replace("runs", "logs"), ["the command of page.md is not here: ", "the command that "]),
    ],
)
def test_a_translation_has_the_sections_and_commands_of_its_page(
    tmp_path: Path, translated: str, complaints: list[str]
) -> None:
    tree = _tree(tmp_path, {"docs/page.md": _ENGLISH, "docs/page.zh-CN.md": translated})
    said = [line for line in _run("check_docs.py", tree).stdout.splitlines() if "zh-CN.md: " in line]
    assert len(said) == len(complaints)
    for line, complaint in zip(said, complaints, strict=True):
        assert line.startswith(f"{tree}/docs/page.zh-CN.md: {complaint}")


# Of each question what people search for, and what of multinode answers it.
QUESTIONS = {
    "90 s/it": ("check strategy", "verb advise", "verb predict"),
    "slower with more nodes": ("verb contrast",),
    "tailscale0": ("check interface", "check link", "check ports", "verb nccl-test"),
    "environment variable RANK expected, but not set": ("error missing-rank", "verb launch"),
    "store->get('0') got error": ("error store-timeout", "verb launch"),
    "is killed by signal: Bus error": ("check machine", "error bus-error"),
    "Watchdog caught collective operation timeout": ("error collective-timeout", "verb launch"),
    "bandwidth is not the bottleneck": ("verb show",),
    "Bootstrap : no socket interface found": ("check variables", "error nccl-no-interface"),
    "connect returned Connection timed out": ("check ports", "error nccl-timed-out"),
    "Connection refused, remote=[127.0.1.1]": ("check hostname", "error gloo-loopback"),
    "Connection closed by peer": ("error gloo-peer-gone", "verb launch"),
}
# As the programs print it, where that is more than is searched for.
WHOLE_LINES = {
    "store->get('0') got error": "[2] is setting up NCCL communicator, but store->get('0') got error: Socket Timeout",
    "is killed by signal: Bus error": "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error.",
    "Connection refused, remote=[127.0.1.1]": "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/"
    "pair.cc:152] timed out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:48019",
    "Connection closed by peer": "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[192.0.2.12]:40192",
}
PLACES = {
    "check": ("checks.md", CHECK_NAMES),
    "error": ("troubleshooting.md", tuple(known_errors())),
    "verb": ("", tuple(VERBS)),
}


@pytest.mark.parametrize("text", QUESTIONS)
def test_a_question_is_found_by_its_error_text_and_answered_by_the_tool(text: str) -> None:
    sections = (_ROOT / "docs" / "faq.md").read_text().split("\n## ")
    (found,) = (section for section in sections if text in " ".join(section.split()))
    for answer in QUESTIONS[text]:
        kind, name = answer.split()
        page, known = PLACES[kind]
        assert name in known
        assert (f"`multinode {name}" if kind == "verb" else f"](reference/{page}#{name})") in " ".join(found.split())
        if kind == "error":
            # The message of a run that fails so is that of the page.
            error = find_error(WHOLE_LINES.get(text, text))
            assert error is not None
            assert error.id == name


def test_a_command_that_no_document_speaks_of_is_named(tmp_path: Path) -> None:
    checked = _run("check_docs.py", _tree(tmp_path, {"docs/reference/cli.md": "`multinode launch`"}))
    assert checked.returncode == 1
    assert "no document but the reference speaks of `multinode launch`" in checked.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("multinode/a.py", "# TODO: later\n", "multinode/a.py:1: TODO: do it, or leave it out"),
        ("scripts/run", "raise NotImplementedError\n", "scripts/run:1: NotImplementedError: do it, or leave it out"),
        ("docs/a.md", "the slave node\n", "docs/a.md:1: 'slave': we say node (docs/glossary.md)"),
        ("multinode/a.py", "# 5 \N{MICRO SIGN}s\n", "multinode/a.py:1: a character that is not ASCII"),
    ],
)
def test_a_file_that_breaks_a_rule_is_named(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    checked = _run("check_tree.py", _tree(tmp_path, {name: text, "multinode/fine.py": "x = 1\n"}))
    assert checked.stdout.splitlines() == [complaint]
    assert checked.returncode == 1


_WORDS = """
# a comment
blue( |-)grey paint -> slate
cog(s|ged)?(?! of) -> gear
"""
_TEXTS = {
    "docs/words.txt": _WORDS,
    "a.py": 'TEXT = (\n    "a wall in blue-grey "\n    f"paint"\n)\n# blue\n# grey paint, and incognito\n',
    "b.md": "What\ncogs do, and > blue\n> grey paint.\n",
    "run": "#!/bin/sh\necho no cog\n",
    "data.json": '"cog"',
    "CHANGELOG.md": "cogged\n",
    "docs/adr/0001-x.md": "cogged\n",
}


def test_a_phrase_that_is_not_ours_is_found_wherever_a_line_ends(tmp_path: Path) -> None:
    root = _tree(tmp_path, _TEXTS)
    for words in (("init", "--quiet"), ("add", ".")):
        subprocess.run(["git", *words], cwd=root, check=True, timeout=600)
    checked = _run("check_words.py", root)
    assert checked.returncode == 1
    assert [line.partition(":")[0] + line.rpartition(":")[2] for line in checked.stdout.splitlines()] == [
        "a.py write slate",
        "a.py write slate",
        "b.md write gear",
        "b.md write slate",
        "run write gear",
    ]


def test_a_word_list_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    checked = _run("check_words.py", _tree(tmp_path, {"docs/words.txt": "cog, gear\n"}))
    assert "'cog, gear' has no ` -> `" in checked.stderr


def test_words_by_hand_and_decisions_are_counted_and_code_and_generated_pages_are_not(tmp_path: Path) -> None:
    files = {
        "README.md": "one two\n\n```\nnot this\n```\n\nthree\n",
        "docs/a.md": "four five\n",
        "docs/a.zh-CN.md": "no\n",
        "docs/reference/cli.md": "# No\n\n<!-- Written by scripts/x.py. -->\n\nno no\n",
        "docs/adr/0001-x.md": "one\n",
    }
    checked = _run("check_docs.py", _tree(tmp_path, files))
    assert checked.stdout.splitlines()[-1] == (
        "5 of 32,000 words by hand, 1 of 10,000 words of ADRs, 7 of 100 lines of README"
    )


@pytest.mark.parametrize(
    ("readme", "code"),
    [
        ("line\n" * 100, 0),
        ("line\n" * 101, 1),
        ("word " * 31_000, 0),
        ("word " * 32_001, 1),
    ],
)
def test_documents_that_are_too_long_are_an_error(tmp_path: Path, readme: str, code: int) -> None:
    commands = re.findall("^#+ (`multinode.*`)$", (_ROOT / "docs/reference/cli.md").read_text(), re.MULTILINE)
    files = {"README.md": readme, "docs/a.md": "\n".join(commands)}
    assert _run("check_docs.py", _tree(tmp_path, files)).returncode == code


def test_the_schemas_of_all_documents_are_made(tmp_path: Path) -> None:
    made = _run("make_contract_reference.py", "--schemas", tmp_path / "schemas")
    assert (made.returncode, made.stderr) == (0, "")
    page = (_ROOT / "docs" / "reference" / "json.md").read_text()
    schemas = {path.name: json.loads(path.read_text()) for path in (tmp_path / "schemas").iterdir()}
    assert set(schemas) == set(re.findall(r"\(schemas/([^)]+)\)", page))
    run = schemas["run-2.json"]["$defs"]["Run"]
    assert run["properties"]["schema"]["default"] == "multinode.run/2"
    assert {"run_id", "status"} <= set(run["required"])
