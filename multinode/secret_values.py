"""What is a secret, by the name it goes by, and the same data without it: in mappings, command lines and text.

A name decides: of a variable, a key, an option. A value that nothing names is known for a secret where those who issue
it give it a beginning of its own (`hf_`, `ghp_`), or where its place on a command line says so (`-u user:password`).
"""

from __future__ import annotations

import functools
import re
from typing import Any

import msgspec

REDACTED = "<redacted>"
FORWARDED = "<forwarded>"

# A tokenizer is not a token, and tokens are what a model reads: TOKENIZERS_PARALLELISM and pad_token are harmless.
_OF_TEXT = re.compile(r"(?:PAD|EOS|BOS|UNK|SEP|CLS|MASK|PER|IMAGE|VIDEO|AUDIO)_TOKEN|TOKENIZ", re.IGNORECASE)
_IS_TOKEN = re.compile(r"TOKEN(?!S)|(?:API|ACCESS|AUTH|REFRESH|HUB|HF)_?TOKENS", re.IGNORECASE)
_IS_OTHER = re.compile(
    r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|(?:API|ACCESS)_?KEY|PRIVATE|AUTHORIZATION|WEBHOOK|_PWD(?![A-Z])",
    re.IGNORECASE,
)
# Names of variables and options that end so. Small letters are often something else: sort_key, forward_pass.
_SERVICE = "api|auth|aws|azure|comet|hf|hub|kaggle|license|mistral|neptune|ngc|nvidia|openai|account|swanlab|wandb"
_OWNER = "admin|auth|db|docker|ftp|git|http|mail|mongo|mysql|pg|postgres|proxy|redis|registry|root|smtp|ssh|sudo|user"
_OTHER_KEYS = "".join(
    f"(?<!{name}_)" for name in ("PUBLIC", "PRIMARY", "FOREIGN", "SORT", "PARTITION", "CACHE", "GROUP")
)
_IS_SHORT = re.compile(
    rf"(?:(?<=[A-Z0-9]_){_OTHER_KEYS}KEYS?"
    rf"|(?<![A-Za-z0-9])(?:PASS|PAT|SAS(?:_URL)?|(?:{_SERVICE})_key|(?:{_OWNER})_?pass|(?:gh|github|gitlab|devops)_pat)"
    r"|(?<=[a-z0-9]_)sas(?:_url)?"
    r"|(?<![A-Za-z0-9])(?i:dsn|cookies?|jwt|bearer|creds|connection_?string|conn_str)"
    r")(?:_?\d+)?(?![A-Za-z0-9_])"
)
# What a name that means a secret holds; without one of these, no text has such a name. Looked for first: it is fast.
_PARTS = (
    *(
        "token",
        "secret",
        "passw",
        "passphrase",
        "credential",
        "apikey",
        "accesskey",
        "_key",
        "private",
        "authorization",
    ),
    *("webhook", "_pwd", "pass", "pat", "sas", "dsn", "cookie", "jwt", "bearer", "creds", "connection", "conn_str"),
)
_PATH = re.compile(r"[~.]{0,2}/.*")
_VALUE = re.compile(
    r"(?<![\w-])(?:hf_(?:[A-Za-z0-9]{30,}|(?=[A-Za-z]*[A-Z0-9])[A-Za-z0-9]{16,})|gh[opusr]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{16,}|glpat-[\w-]{15,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|xox[a-z]-[A-Za-z0-9-]{8,}|npm_[A-Za-z0-9]{30,}"
    r"|sk-(?=[\w-]*[A-Z0-9])[\w-]{16,}|nvapi-[\w-]{16,}|dckr_pat_[\w-]{16,}|pypi-[\w-]{30,}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})"
)
_VALUE_PARTS = (
    *("hf_", "gho_", "ghp_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "AKIA", "ASIA", "xox", "npm_", "sk-"),
    *("nvapi-", "dckr_pat_", "pypi-", "AIza", "eyJ"),
)
# user:password after the option, and what follows a login; numbers are ids of a user and a group.
_USER_OPTIONS = frozenset({"u", "user", "proxy-user"})
_USER = re.compile(r"([^\s:'\"/]+:)(?!\d+\Z)(?!<redacted>)[^\s'\"]+")
_REGISTRIES = frozenset({"docker", "podman", "nerdctl"})
_SHORTEST_KEY = 16
_IN_COMMAND = (
    re.compile(
        r"(?P<kept>(?<!\S)(?:-u|--(?:proxy-)?user)[ \t=]*['\"]?[^\s:'\"/-][^\s:'\"/]*:)"
        r"(?!\d+(?!\S))(?!<redacted>)[^\s'\"]+"
    ),
    re.compile(r"(?P<kept>\bwandb[ \t]+login[ \t](?:[^\n;&|]{0,200}?[ \t])?['\"]?)(?!-)[\w-]{16,}"),
    re.compile(
        r"(?P<kept>\b(?:docker|podman|nerdctl)[ \t]+login[ \t](?:[^\n;&|]{0,200}?[ \t])?-p[ \t=]*)"
        r"(?!'?<redacted>)[^\s;&|]+"
    ),
)
_NUMBER = re.compile(r"[-+]?[\d.]+(?:[eE][-+]?\d+)?")
# None of these tells a secret: a switch, nothing at all, a reference to a variable.
_TELLS_NOTHING = re.compile(
    rf"|true|false|yes|no|on|off|none|null|~|\$\w+|\$\{{\w+\}}|{REDACTED}|{FORWARDED}", re.IGNORECASE
)

_NAME = r"[A-Za-z_][\w.-]*"
_BEGIN = r"(?<![\w.-])"
_QUOTED = r"""'[^']*'|"(?:[^"\\]|\\.)*\""""
_SHELL_WORD = rf"""(?:\\.|{_QUOTED}|\$\([^()]*\)|`[^`]*`|[^\s'"\\;&|<>()`])+"""
# The value after each of these goes. What takes its place is quoted where a shell or YAML may read it.
_IN_TEXT = tuple(
    (re.compile(rf"(?P<kept>{kept})(?P<value>{value})", re.MULTILINE), place)
    for kept, value, place in (
        # NAME=value, --name=value
        (rf"{_BEGIN}-{{0,2}}(?P<name>{_NAME})\+?=", _SHELL_WORD, f"'{REDACTED}'"),
        # --name value
        (rf"(?<![\w-])--?(?P<name>{_NAME})[ \t]+", rf"(?!-){_SHELL_WORD}", f"'{REDACTED}'"),
        # name: value, alone on its line
        (rf"""^[ \t#-]*["']?(?P<name>{_NAME})["']?[ \t]*:[ \t]+""", rf"{_QUOTED}|\S.*", f'"{REDACTED}"'),
        # "name": "value"
        (rf"""(?P<quote>["'])(?P<name>{_NAME})(?P=quote)\s*:\s*""", rf"""{_QUOTED}|[^\s"',}}\]]+""", f'"{REDACTED}"'),
        # name: value, inside braces or quotes
        (rf"""(?<=["'{{,])\s*(?P<name>{_NAME})\s*:\s+""", rf"""{_QUOTED}|[^\s"'][^"'\n,}}\]]*""", REDACTED),
    )
)
_IN_URL = re.compile(r"(?<=://)([^\s/:@'\"]*):[^\s/@'\"]+@")
_OPTION = re.compile(rf"--?({_NAME})")
_ASSIGNMENT = re.compile(rf"([-+]*({_NAME})\+?=)(.*)", re.DOTALL)


def is_secret(name: str) -> bool:
    """Whether what goes by this name is likely a secret, and is therefore never shown or stored."""
    folded = name.replace("-", "_").lower()
    return any(part in folded for part in _PARTS) and (_is_token(name) or _is_other(name) or _is_short(name))


def hides(name: str, value: object) -> bool:
    """Whether this value under this name is a secret: a number of tokens is none, and neither is a switch."""
    if value is None or isinstance(value, bool) or not is_secret(name):
        return False
    text = str(value).strip().strip("'\"")
    if _TELLS_NOTHING.fullmatch(text) is not None:
        return False
    return _is_other(name) or (_NUMBER.fullmatch(text) is None and (_is_token(name) or _PATH.fullmatch(text) is None))


def redacted(value: object) -> Any:
    """The document of a value, as it is written and shown: plain data without secrets.

    A value of which more is secret than names tell leaves that out in a `document()` of its own.
    """
    document = getattr(value, "document", None)
    return redact(msgspec.to_builtins(value if document is None else document(), str_keys=True))


def redact(value: Any) -> Any:
    """Plain data without the secrets in it."""
    if isinstance(value, dict):
        return {name: _redact_named(name, entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        words = [text for text in value if isinstance(text, str)]
        return list(redact_words(words)) if len(words) == len(value) else [redact(entry) for entry in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_words(words: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Words of a command line without secret values in `--name value`, `--name=value` and `name=value`."""
    shown: list[str] = []
    option = None
    for place, word in enumerate(words):
        assigned = _ASSIGNMENT.fullmatch(word)
        if option is not None and not word.startswith("-") and hides(option, word):
            shown.append(REDACTED)
        elif option in _USER_OPTIONS and (user := _USER.fullmatch(word)) is not None:
            shown.append(user[1] + REDACTED)
        elif _is_login(words[:place], option, word):
            shown.append(REDACTED)
        elif assigned is not None and hides(assigned[2], assigned[3]):
            shown.append(assigned[1] + REDACTED)
        else:
            shown.append(redact_text(word))
        named = _OPTION.fullmatch(word)
        option = named[1] if named is not None else None
    return tuple(shown)


def _is_login(before: list[str] | tuple[str, ...], option: str | None, word: str) -> bool:
    """Whether a word is what is logged in with, by `wandb login KEY` or `docker login -p PASSWORD`."""
    if word.startswith("-") or "login" not in before[1:]:
        return False
    program = before[before.index("login", 1) - 1].rpartition("/")[2]
    return (program == "wandb" and len(word) >= _SHORTEST_KEY) or (program in _REGISTRIES and option == "p")


def redact_text(text: str) -> str:
    """The text without passwords in URLs, and without values that a shell, YAML or JSON assigns to a secret's name."""
    if "://" in text:
        text = _IN_URL.sub(rf"\1:{REDACTED}@", text)
    if any(part in text for part in _VALUE_PARTS):
        text = _VALUE.sub(REDACTED, text)
    if "login" in text or "-u" in text:
        for pattern in _IN_COMMAND:
            text = pattern.sub(rf"\g<kept>{REDACTED}", text)
    if not is_secret(text):
        return text
    for pattern, place in _IN_TEXT:
        text = pattern.sub(functools.partial(_without_value, place), text)
    return text


# Nodes mostly get the files of one job, and a plan is made, shown and written.
@functools.lru_cache(maxsize=32)
def redact_file(text: str) -> str:
    """The text of a file without secrets. A YAML or JSON mapping is parsed, so that no layout of it keeps a secret."""
    if not is_secret(text):
        return redact_text(text)
    from multinode.strict_yaml import YamlError, dump_yaml, parse_yaml

    try:
        config = parse_yaml(text)
    except YamlError:
        return redact_text(text)
    if not isinstance(config, dict):
        return redact_text(text)
    wanted = redact(config)
    shown = redact_text(text)
    try:
        return shown if parse_yaml(shown) == wanted else dump_yaml(wanted)
    except YamlError:
        return dump_yaml(wanted)


def _is_token(name: str) -> bool:
    return _IS_TOKEN.search(_OF_TEXT.sub("", name.replace("-", "_"))) is not None


def _is_other(name: str) -> bool:
    return _IS_OTHER.search(name.replace("-", "_")) is not None


def _is_short(name: str) -> bool:
    return _IS_SHORT.search(name.replace("-", "_")) is not None


def _redact_named(name: object, value: Any) -> Any:
    if not isinstance(name, str) or not is_secret(name):
        return redact(value)
    if isinstance(value, dict):
        return {key: _redact_named(name, entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_redact_named(name, entry) for entry in value]
    return REDACTED if hides(name, value) else redact(value)


def _without_value(place: str, match: re.Match[str]) -> str:
    return match["kept"] + place if hides(match["name"], match["value"]) else match[0]
