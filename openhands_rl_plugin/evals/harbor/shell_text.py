"""The commands in a shell text, for finding out what it installs. Nothing is ever executed by this reading."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator

_PUNCTUATION = ";&|()<>\n"
_ASSIGNED = re.compile(r"[A-Za-z_]\w*\+?=")
_HEREDOC = re.compile(r"(<<-?\s*(['\"]?)(\w+)\2[^\n]*\n)(?:.*?\n)??\s*\3[ \t]*(?=\n|\Z)", re.DOTALL)
_COMMENT = re.compile(r"(?:^|(?<=[ \t;&|]))#[^'\"\n]*$|^[ \t]*#.*$", re.MULTILINE)
_SUBSTITUTION = re.compile(r"\$\(([^()]+)\)|`([^`]+)`")
_BEFORE = re.compile(r"if|then|else|elif|while|until|do|!|[{}]|time|exec|sudo|command|nohup|env|fi|done")
_ALREADY = frozenset({"pip", "setuptools", "wheel", "uv"})
_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,. -]*\])?\s*((===?|~=|!=|[<>]=?)[^$/]+)?(\s*;.+)?")
_PIP_VALUES = re.compile(
    r"-[ifp]|--((extra-)?index-url|find-links|(default-)?timeout|retries|cache-dir|progress-bar|trusted-host"
    r"|root-user-action|python|log|upgrade-strategy|index-strategy)"
)
_PIP_REFUSED = re.compile(r"-[ect]|--(editable|constraint|target|prefix|root)")


def commands_of(text: str) -> list[list[str]]:
    """The simple commands in ``text``, also in ``bash -c`` and ``$(...)``: their words, without redirections,
    assignments and keywords before them."""
    plain = re.sub(r"\\[ \t]*\n", " ", _COMMENT.sub("", _HEREDOC.sub(r"\1", text)))
    try:
        tokens = _tokens(plain)
    except ValueError:
        tokens = [token for line in plain.splitlines() for token in (*_rough(line), "\n")]
    found: list[list[str]] = []
    for words in _split(tokens):
        found += [
            inner for word in words for part in _SUBSTITUTION.findall(word) for inner in commands_of("".join(part))
        ]
        while words and (_BEFORE.fullmatch(words[0]) or _ASSIGNED.match(words[0])):
            words = words[1:]
        if len(words) > 2 and words[0] == "timeout":
            words = words[2:]
        if len(words) > 2 and words[0].rpartition("/")[2] in ("bash", "sh") and re.fullmatch(r"-\w*c", words[1]):
            found += commands_of(words[2])
        elif words:
            found.append(words)
    return found


def pip_words(words: list[str]) -> list[str] | None:
    """What follows ``pip`` in a command of pip, ``python -m pip`` or ``uv pip``; ``None`` for another command."""
    program = words[0].rpartition("/")[2]
    if re.fullmatch(r"pip[\d.]*", program):
        return words[1:]
    if re.fullmatch(r"python[\d.]*", program) and words[1:3] == ["-m", "pip"]:
        return words[3:]
    return words[2:] if program == "uv" and words[1:2] == ["pip"] else None


def read_pip(words: list[str], listed: Callable[[str], list[str] | None]) -> tuple[list[str], bool]:
    """The packages of ``pip WORDS``, and whether that is all it does. ``listed``: the lines of a requirements file,
    ``None`` where it is not known."""
    action = next((word for word in words if not word.startswith("-")), "")
    if action in ("", "list", "show", "freeze", "check", "config", "cache"):
        return [], True
    if action != "install":
        return [], False
    wanted: list[str] = []
    rest = iter(words[words.index("install") + 1 :])
    for word in rest:
        option, _, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if _PIP_REFUSED.fullmatch(option):
            return wanted, False
        if option in ("-r", "--requirement"):
            lines = listed(value or next(rest, ""))
            if lines is None:
                return wanted, False
            wanted += lines
        elif _PIP_VALUES.fullmatch(option):
            if not value:
                next(rest, "")
        elif not word.startswith("-"):
            wanted.append(word)
    complete = all(_REQUIREMENT.fullmatch(word) for word in wanted)
    return [word for word in wanted if _REQUIREMENT.fullmatch(word) and word not in _ALREADY], complete


def requirement_lines(text: str) -> list[str]:
    """The lines of a requirements file, without comments; options are lines that are no requirements."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


def package_names(words: list[str]) -> list[str]:
    """The packages of an ``apt-get install``; nothing for its other actions."""
    plain = [
        word for at, word in enumerate(words[1:], 1) if not word.startswith("-") and words[at - 1] not in ("-t", "-o")
    ]
    return [re.split(r"[=/]", word)[0] for word in plain[1:]] if plain[:1] == ["install"] else []


def _tokens(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    return list(lexer)


def _rough(line: str) -> list[str]:
    try:
        return _tokens(line)
    except ValueError:
        return line.split()


def _split(tokens: list[str]) -> Iterator[list[str]]:
    words: list[str] = []
    skip = False
    for token in tokens:
        if not token or not set(token) <= set(_PUNCTUATION):
            if not skip:
                words.append(token)
            skip = False
        elif set(token) & set("<>") and not set(token) & set(";()|\n"):
            skip = True  # the file of a redirection, after the number of what is redirected
            if words and words[-1].isdigit():
                words.pop()
        else:
            if words:
                yield words
            words, skip = [], False
    if words:
        yield words
