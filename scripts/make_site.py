"""Builds the documentation site from the pages of the repository, in each language that they are written in.

The pages are copied, laid out as in the repository, to where mkdocs builds them; links to a page of another language
lead to its site. Each version has a folder of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import posixpath
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from make_contract_reference import render_schemas

from multinode import __version__

ROOT = Path(__file__).parent.parent
_CONTENTS = "docs/README.md"
_TRANSLATED = ".zh-CN.md"
# In Markdown and in HTML; what leads outside or into the page itself is none of ours.
_LINK = re.compile(
    r"""(?P<before>\]\(|(?:src|href)=")(?P<path>(?![a-z]+:|#)[^)\s#"]+)(?P<anchor>#[^)\s"]*)?(?P<after>[)"])"""
)
_TEXT_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>[^)\s#]+)\)")
_SCHEMAS = "docs/reference/schemas/"
_FILES = ("LICENSE", "docs/words.txt")
_SECTION = re.compile(r"\*\*(?P<title>.+)\*\*")
_CATALOGUE = "docs/reference/troubleshooting.md"
# An error message under its name: its texts, indented.
_ENTRY = re.compile(r"^### (?P<name>[\w-]+)\n\n(?P<texts>(?: {4}.+\n)+)", re.MULTILINE)
_LONGEST_TITLE = 130
_FENCE = re.compile(r"^\s*```")
_HAN = re.compile("[\u4e00-\u9fff]")
_REDIRECT = (
    '<!doctype html><meta charset="utf-8"><title>multinode</title><meta http-equiv="refresh" content="0; url={0}/">'
)


class Language(NamedTuple):
    """A language of the site: mkdocs-material's name of it, its own, and the folder of its versions."""

    code: str
    name: str
    folder: str


ENGLISH = Language("en", "English", "")
CHINESE = Language("zh", "\N{CJK UNIFIED IDEOGRAPH-4E2D}\N{CJK UNIFIED IDEOGRAPH-6587}", "zh/")
LANGUAGES = (ENGLISH, CHINESE)


def main() -> None:
    """Build the site; mkdocs says what is wrong with it, and fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", nargs="?", type=Path, default=ROOT / "build" / "site")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    build_site(parser.parse_args().output)


def build_site(output: Path, version: str = __version__) -> None:
    """Build one version in all languages, beside those that are there."""
    with tempfile.TemporaryDirectory() as folder:
        for language in LANGUAGES:
            staged = Path(folder) / language.code
            Pages(language, version).stage(staged)
            _build(language, version, staged, output / language.folder / version)
    for language in LANGUAGES:
        top = output / language.folder
        found = sorted((path.parent.name for path in top.glob("*/index.html")), key=_order, reverse=True)
        versions = [{"version": one, "title": one, "aliases": []} for one in found if one[:1].isdigit()]
        (top / "versions.json").write_text(json.dumps(versions))
        (top / "index.html").write_text(_REDIRECT.format(versions[0]["version"]))


def _order(version: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in version.split(".")]


def _build(language: Language, version: str, staged: Path, output: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(
        str(ROOT / "mkdocs.yml"),
        docs_dir=str(staged),
        site_dir=str(output),
        nav=_contents(language),
    )
    config.theme["language"] = language.code
    here = f"{language.folder}{version}"
    config.extra["alternate"] = [
        {"name": one.name, "lang": one.code, "link": posixpath.relpath(f"{one.folder}{version}", here) + "/"}
        for one in LANGUAGES
    ]
    build(config)
    if language == CHINESE:
        _set_apart(output / "search" / "search_index.json")


def _set_apart(index: Path) -> None:
    """Make each Chinese character a word of the search, which knows words by the spaces between them."""
    found = json.loads(index.read_text())
    for document in found["docs"]:
        for field in ("title", "text"):
            document[field] = _HAN.sub("\u200b\\g<0>\u200b", document[field])
    index.write_text(json.dumps(found))


def _contents(language: Language) -> list[dict[str, Any]]:
    """The pages of a language in the order of its docs/README.md, under its headings."""
    contents = _CONTENTS if language == ENGLISH else _CONTENTS.replace(".md", _TRANSLATED)
    first, *lines = (ROOT / contents).read_text().splitlines()
    found: list[dict[str, Any]] = [{"multinode": "README.md"}, {first.removeprefix("# "): _CONTENTS}]
    section: list[dict[str, str]] = []
    for line in lines:
        if (title := _SECTION.fullmatch(line)) is not None:
            section = []
            found.append({title["title"]: section})
        for link in _TEXT_LINK.finditer(line):
            path = posixpath.normpath(posixpath.join("docs", link["path"]))
            if path.endswith(".md") and path.endswith(_TRANSLATED) == (language == CHINESE):
                section.append({link["text"][0].upper() + link["text"][1:]: _staged(path)})
    return [one for one in found if all(one.values())]


class Pages:
    """The pages of one language.

    Args:
        version: of the site; links to another language lead to the same one.
    """

    def __init__(self, language: Language, version: str) -> None:
        self._language = language
        self._version = version
        self._sources = {
            language: {_staged(path): path for path in _pages() if path.endswith(_TRANSLATED) == (language == CHINESE)}
            for language in LANGUAGES
        }

    def stage(self, folder: Path) -> None:
        """Copy them with what they show, and write a page for each JSON schema."""
        for target, source in self._sources[self._language].items():
            path = folder / target
            path.parent.mkdir(parents=True, exist_ok=True)
            text = self._with_links(target, source, (ROOT / source).read_text())
            path.write_text(_searchable(text) if target == _CATALOGUE else text)
        shutil.copytree(ROOT / "docs" / "pictures", folder / "docs" / "pictures")
        for name in _FILES:
            shutil.copy(ROOT / name, folder / name)
        if self._language == ENGLISH:
            (folder / _SCHEMAS).mkdir(parents=True)
            for name, text in render_schemas().items():
                path = folder / _SCHEMAS / name
                path.write_text(text)
                path.with_suffix(".md").write_text("".join(schema_page(path.stem, json.loads(text))))

    def _with_links(self, target: str, source: str, text: str) -> str:
        lines = []
        in_code = False
        for line in text.splitlines():
            in_code ^= bool(_FENCE.match(line))
            whole = in_code or line.startswith("    ")
            lines.append(line if whole else _LINK.sub(lambda link: self._led(target, source, link), line))
        return "\n".join(lines) + "\n"

    def _led(self, target: str, source: str, link: re.Match[str]) -> str:
        """The link as it leads from the page in its language; one to what is no page of any is left as it is."""
        named = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["path"]))
        wanted = CHINESE if named.endswith(_TRANSLATED) else self._language
        here = _staged(named)
        for language in dict.fromkeys((wanted, self._language, ENGLISH)):
            if here not in self._sources[language]:
                continue
            if language == self._language:
                path = posixpath.relpath(here, posixpath.dirname(target))
            else:
                path = posixpath.relpath(self._url(language, here), self._url(self._language, target)) + "/"
            return f"{link['before']}{path}{link['anchor'] or ''}{link['after']}"
        return link[0].replace(".json", ".md") if named.startswith(_SCHEMAS) else link[0]

    def _url(self, language: Language, page: str) -> str:
        """Of a page, from the top of all versions."""
        folder, name = posixpath.split(page)
        name = "" if name == "README.md" else name.removesuffix(".md")
        return posixpath.normpath(posixpath.join(language.folder, self._version, folder, name))


def _searchable(text: str) -> str:
    """The catalogue with the texts of its entries as titles; the names of projects alone are none to be found."""
    return _ENTRY.sub(_titled, re.sub(r"^(## .+)$", r"\1 { data-search-exclude }", text, flags=re.MULTILINE))


def _titled(entry: re.Match[str]) -> str:
    """An entry of the catalogue under the texts that people search for, with the anchor of its name."""
    texts = [line.strip() for line in entry["texts"].splitlines()]
    title, words = "", set[str]()
    for text in texts:
        new = set(re.findall(r"\w+", text.lower())) - words
        # A text that mostly repeats the others would only make the title count for less.
        if not title or (2 * len(new) > len(text.split()) and len(title) + len(text) < _LONGEST_TITLE):
            title += f" / {text}" if title else text
            words |= new
    escaped = re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", title)
    return f"### {escaped} {{ #{entry['name']} }}\n\n`{entry['name']}`\n\n{entry['texts']}"


def _pages() -> Iterator[str]:
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md"):
        for path in sorted(ROOT.glob(pattern)):
            yield path.relative_to(ROOT).as_posix()


def _staged(path: str) -> str:
    return path.removesuffix(_TRANSLATED) + ".md" if path.endswith(_TRANSLATED) else path


def schema_page(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """A JSON schema as tables, one a struct."""
    # Names of fields shall not come before what explains them.
    yield "---\nsearch:\n  boost: 0.2\n---\n"
    yield f"# {name}\n\nWhat a document has; [the JSON schema]({name}.json) is for programs.\n"
    for title, struct in schema.get("$defs", {}).items():
        yield f"\n## {title}\n\n{_described(struct)}\n"
        if struct.get("properties"):
            yield "\n| field | type | default | meaning |\n|---|---|---|---|\n"
            for field, kind in struct["properties"].items():
                default = f"`{json.dumps(kind['default'])}`" if "default" in kind else ""
                yield f"| `{field}` | {_type_words(kind)} | {default} | {_escaped(kind.get('description', ''))} |\n"


def _described(struct: Mapping[str, Any]) -> str:
    text = str(struct.get("description", ""))
    lead, _, fields = text.partition("Attributes:\n")
    lines = " ".join(line.strip() for line in lead.splitlines())
    named = re.sub(r"\n {12,}", " ", fields)
    items = [
        f"- `{one.partition(':')[0].strip()}`:{one.partition(':')[2]}" for one in named.splitlines() if one.strip()
    ]
    return _escaped(lines) + ("\n\n" + _escaped("\n".join(items)) if items else "")


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "\\|")


def _type_words(kind: Mapping[str, Any]) -> str:
    if "$ref" in kind:
        name = kind["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in kind:
        return " or ".join(_type_words(one) for one in kind["anyOf"])
    if "enum" in kind:
        return " or ".join(f"`{one}`" for one in kind["enum"])
    if kind.get("type") == "array" and isinstance(kind.get("items"), dict):
        return f"array of {_type_words(kind['items'])}"
    if kind.get("type") == "object" and isinstance(kind.get("additionalProperties"), dict):
        return f"object of {_type_words(kind['additionalProperties'])}"
    return str(kind.get("type", "any"))


if __name__ == "__main__":
    main()
