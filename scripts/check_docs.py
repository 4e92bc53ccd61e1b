"""Checks the documents: links and pictures resolve, commands exist as written, and every command is written about.

Files of the repository that they name exist, but in what tells history: decisions and the change log. The CLI reference
does not count as writing about a command: it is generated. A translation, `PAGE.zh-CN.md`, has the sections, the code,
the commands and the links of `PAGE.md`. The words of hand-written pages and of decisions, and the lines of the README,
have limits; generated pages, translations and blocks of code do not count.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from make_cli_reference import parameter_names, walk_commands
from make_contract_reference import render_schemas

# The end of a link or a picture, whose words may begin on the line before; a definition of one; HTML.
_LINK = re.compile(r"""\]\((?P<inline>[^)\s]+)\)|^\[[^\]]+\]: (?P<defined>\S+)|(?:src|href)="(?P<html>[^"]+)\"""")
_PICTURES = {".svg", ".png", ".jpg", ".gif"}
_LARGEST_PICTURE_BYTES = 300_000
_TRANSLATED = ".zh-CN"
_GENERATED = "schemas"
_HEADING = re.compile(r"#+ (?P<title>.+)")
_INLINE_CODE = re.compile(r"`(?P<code>[^`]+)`")
_FENCE = "```"
# Of the repository, or of the package, whose layers are named without it; capitals stand for any name.
_FILE = re.compile(r"[a-z0-9_.-]+(?:/[a-z0-9_.-]+)+/?")
_PLACES = ("multinode", "tests", "scripts", "docs", "benchmarks", "configs", "hostfiles")
_HISTORY = {"adr", "CHANGELOG.md"}
_ROOT = "multinode"
_WORDS_BY_HAND, _WORDS_OF_DECISIONS, _README_LINES = 32_000, 10_000, 100
# In the head of a generated page.
_WRITTEN_BY = "<!-- Written by "
# Where a command line ends: the script's own arguments, a comment, the shell's operators.
_ENDS = {"--", "#", "|", "&&", ";", ">", "\\"}

Options = Mapping[str, frozenset[str]]


def main() -> int:
    """Print what is wrong, one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent)
    root: Path = parser.parse_args().root
    documents = sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "benchmarks").glob("*.md")])
    problems = [
        *check_documents(documents, known_options()),
        *check_files(documents, root),
        *check_translations(documents),
    ]
    for problem in problems:
        print(problem)
    sizes = list(measure(root))
    print(", ".join(f"{size:,} of {limit:,} {what}" for what, size, limit in sizes))
    return 1 if problems or any(size > limit for _, size, limit in sizes) else 0


def measure(root: Path) -> Iterator[tuple[str, int, int]]:
    """The size of the documents, and its limit."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    texts = {page: page.read_text() for page in pages if page.is_file() and not page.stem.endswith(_TRANSLATED)}
    decisions = {page: text for page, text in texts.items() if page.parent.name == "adr"}
    by_hand = [text for page, text in texts.items() if page not in decisions and _WRITTEN_BY not in text]
    yield "words by hand", sum(map(count_words, by_hand)), _WORDS_BY_HAND
    yield "words of ADRs", sum(map(count_words, decisions.values())), _WORDS_OF_DECISIONS
    yield "lines of README", len(texts.get(root / "README.md", "").splitlines()), _README_LINES


def count_words(text: str) -> int:
    """Words outside of blocks of code; what has no letter or digit, such as the lines of a table, is no word."""
    return sum(any(map(str.isalnum, word)) for part in text.split("\n```")[::2] for word in part.split())


def known_options() -> Options:
    """The spellings of the options of every command."""
    return {
        name: frozenset(
            ["--help", "-h", *(spelling for option in command.params for spelling in parameter_names(option))]
        )
        for name, command in walk_commands()
    }


def check_documents(documents: Iterable[Path], options: Options) -> Iterator[str]:
    """What is wrong in all documents together."""
    mentioned: set[str] = set()
    for document in documents:
        for number, line, in_code in _lines(document):
            where = f"{document}:{number}"
            if not in_code:
                yield from (f"{where}: {problem}" for problem in _check_links(document, line))
            for words in _commands(line, in_code=in_code):
                name = _command_name(words, options)
                if not document.name.startswith("cli"):
                    mentioned.add(name)
                yield from (f"{where}: {problem}" for problem in _check_command(name, words, options))
    for name in options:
        is_group = any(other.startswith(f"{name} ") for other in options)
        if not is_group and name not in mentioned:
            yield f"no document but the reference speaks of `{name}`"


def check_files(documents: Iterable[Path], root: Path) -> Iterator[str]:
    """Files and folders that documents name and the repository does not have."""
    layers = {path.name for path in (root / _ROOT).glob("*/")}
    for document in documents:
        if _HISTORY & set(document.parts):
            continue
        for number, line, in_code in _lines(document):
            for match in () if in_code else _INLINE_CODE.finditer(line):
                name = match["code"].split()[0]
                place = name.partition("/")[0]
                of_layer = place in layers and not (root / _ROOT / name).exists()
                if _FILE.fullmatch(name) and (place in _PLACES or of_layer) and not (root / name).exists():
                    yield f"{document}:{number}: there is no {name}"


def check_translations(documents: Iterable[Path]) -> Iterator[str]:
    """Sections, code and commands that a translation lacks, or has beyond the page that it translates."""
    for document in documents:
        if document.stem.endswith(_TRANSLATED):
            original = document.with_name(f"{document.stem.removesuffix(_TRANSLATED)}.md")
            for what, parts in _parts(original).items():
                here = _parts(document)[what]
                yield from (f"{document}: {what} of {original.name} is not here: {part}" for part in parts - here)
                yield from (f"{document}: {what} that {original.name} has not: {part}" for part in here - parts)
            if _levels(document) != _levels(original):
                yield f"{document}: its sections do not nest as those of {original.name}"


def _parts(document: Path) -> dict[str, Counter[str]]:
    """What is the same in every language, and how often it is there."""
    code: Counter[str] = Counter()
    commands: Counter[str] = Counter()
    links: Counter[str] = Counter()
    for _, line, in_code in _lines(document):
        # Comments are translated.
        if in_code and (text := re.sub(r"(^|\s)#\s.*", "", line).rstrip()):
            code[text] += 1
        elif not in_code:
            commands.update(" ".join(words) for words in _commands(line, in_code=False))
            links.update(link.replace(_TRANSLATED, "") for link in _links(line))
    return {"the code": code, "the command": commands, "the link": links}


def _levels(document: Path) -> list[int]:
    return [line.index(" ") for _, line, in_code in _lines(document) if not in_code and _HEADING.fullmatch(line)]


def _lines(document: Path) -> Iterator[tuple[int, str, bool]]:
    in_code = False
    for number, line in enumerate(document.read_text().splitlines(), start=1):
        if line.lstrip().startswith(_FENCE):
            in_code = not in_code
            continue
        yield number, line, in_code or line.startswith("    ")


def _check_links(document: Path, line: str) -> Iterator[str]:
    for link in _links(line):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = document.parent / path if path else document
        if target.parent.name == _GENERATED:
            if target.name not in _schemas():
                yield f"the link {link} leads to no schema"
        elif not target.exists():
            yield f"the link {link} leads nowhere"
        elif anchor and target.suffix == ".md" and anchor not in _anchors(target):
            yield f"the link {link} names a heading that is not there"
        elif target.suffix in _PICTURES and target.stat().st_size > _LARGEST_PICTURE_BYTES:
            yield f"the picture {link} is larger than {_LARGEST_PICTURE_BYTES // 1000} kB"


@functools.cache
def _schemas() -> frozenset[str]:
    """Files that the site has, and the repository has not."""
    return frozenset(render_schemas())


def _links(line: str) -> Iterator[str]:
    """Where the links and pictures of a line lead."""
    for match in _LINK.finditer(line):
        yield match["inline"] or match["defined"] or match["html"]


def _anchors(document: Path) -> set[str]:
    """Headings as links name them."""
    headings = [_HEADING.fullmatch(line) for _, line, in_code in _lines(document) if not in_code]
    titles = [heading["title"].lower() for heading in headings if heading is not None]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in titles}


def _commands(line: str, *, in_code: bool) -> Iterator[list[str]]:
    """The commands of ours in a line, as words."""
    for text in [line] if in_code else [match["code"] for match in _INLINE_CODE.finditer(line)]:
        words = text.replace(".venv/bin/", "").split()
        while words[:1] in (["$"], ["sudo"]):
            words = words[1:]
        if words[:1] == [_ROOT]:
            end = next((at for at, word in enumerate(words) if word in _ENDS), len(words))
            yield words[:end]


def _command_name(words: list[str], options: Options) -> str:
    """The longest beginning that is a command."""
    for end in range(len(words), 0, -1):
        if " ".join(words[:end]) in options:
            return " ".join(words[:end])
    return _ROOT


def _check_command(name: str, words: list[str], options: Options) -> Iterator[str]:
    rest = words[len(name.split()) :]
    is_group = any(other.startswith(f"{name} ") for other in options)
    if is_group and rest and re.fullmatch(r"[a-z][a-z-]*", rest[0]):
        yield f"there is no command `{name} {rest[0]}`"
        return
    for before, word in itertools.pairwise(["", *rest]):
        # Its value looks like an option.
        if before == "--grid-arg":
            continue
        spelling = word.partition("=")[0].strip("[],")
        if re.fullmatch(r"--?[a-z][a-z-]*", spelling) and spelling not in options[name]:
            yield f"`{name}` has no option {spelling}"


if __name__ == "__main__":
    sys.exit(main())
