"""Places where a whole value is a secret, with all its signs: in quotes, to the end of a line, between tags.

Each is found from a word such as ``password`` or ``key``; what else is in the line says whether a value follows.
"""

from __future__ import annotations

import re

from openhands_rl_plugin.core.secret_values import is_code, is_dummy, is_noise, is_random, is_strong

Span = tuple[int, int]

WORDS = (b"key", b"token", b"secret", b"pass", b"credential", b"auth", b"pwd", b"_pat")
"""What a name of a secret has in it, in small letters."""
LONGEST_NAME = 64
_LONGEST_VALUE = 256
_LONGEST_LINE = 160  # of what stands before a name

SUFFIX = r"s?(?:_?[0-9]{1,3}|_(?:old|new|prod|production|staging|dev|test|live|backup|primary|secondary|default|b64))?"
_PLACE = re.compile(
    rf"""(?P<word>key|token|secret|password|passwd|passphrase|pass|pwd|credentials?|authorization|auth)
        (?P<suffix>{SUFFIX})
        (?: (?P<tag>>)
          | (?P<end>\\*["'])?\]?[ \t]{{0,3}}(?P<sign>=>|:=|=|:)[ \t]{{0,3}}
          | (?P<said>[ \t]is:?[ \t]{{1,3}})
          | (?P<space>[ \t]{{1,3}})
        )(?:[bru]?(?P<quote>\\*["']))?""",
    re.VERBOSE | re.IGNORECASE,
)
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_RUN = re.compile(r"""[^\s"'`\\]{4,160}""")
_NEXT_FIELD = re.compile(r"&[\w.-]{1,64}=")
_LINE_ENDS = re.compile(r"""[ \t]*(?:\\*[rn]|[\r\n]|\Z)""")
_CLOSED = re.compile(r"""\\*["']""")
_IN_TAG = re.compile(r"[^<>\n]{4,160}(?=</)")
_LINE_START = re.compile(
    r"""(?:\A|[\r\n]|\\[rn]|(?<![\w])["'])[ \t]*
        (?P<lead>-[ \t]|(?:export|ENV|set|declare\ -x|-e)[ \t]+|//[\w.:/-]+/:)?\Z""",
    re.VERBOSE,
)
_COMMAND = re.compile(r"aws configure set [ \t]*\Z")
_INVENTORY = re.compile(r"(?i)\A(?:ansible_[a-z_]*|become_|ssh_|sudo_|winrm_)(?:pass|password)\Z")

_SECRET_KEY = re.compile(
    r"(?i)(?:api|secret|access|private|auth|account|subscription|sign(?:ing)?|encrypt(?:ion)?|master|deploy|license)"
    r"[_.-]?key\Z"
)
_OTHER_NAME = re.compile(r"(?i)(?:[a-z](?:pass|auth|pwd)|first_pass|last_pass)\Z")
_HEADER = re.compile(r"(?i)-(?:key|token|secret)\Z")
_TOLD = frozenset({"key", "token", "secret", "password", "passwd", "passphrase"})
_KIND_OF_KEY = re.compile(r"(?i)(?:api|access|secret|private|license)[ _-]?\Z")
_OTHER_TOKEN = re.compile(
    r"(?i)(?:next|page|pagination|continuation|purchase|start|end|eos|bos|pad|sep|unk|mask|cls|stop|sync|resume|cancel"
    r"|cancellation|client|idempotency|request|csrf)[_-]?token\Z"
)
_VARIABLE = re.compile(r"_?[A-Z][A-Z0-9_]*\Z")
_SHORT = frozenset({"pass", "pwd", "auth"})
_ACCOUNT = re.compile(r"(?i)(?:uid|user id|username|user)=[^;\n]{1,128};(?:[^;\n]{1,128};)*\Z")
_TO_SEMICOLON = re.compile(r"""[^\s;"'\\]{4,256}""")

_SQL = re.compile(r"""(?i)identified\ (?:with\ [\w'"]{1,40}\ )?by\ (?:password\ )?(?P<quote>\\*["'])""")
_PAIR = re.compile(
    r"""auth\s{0,3}=\s{0,3}[\w.]{0,40}\(\s{0,3}[bru]?(\\*["'])(?P<user>[^"'\n\\]{1,128})\1\s{0,3},
        \s{0,3}[bru]?(?P<quote>\\*["'])""",
    re.VERBOSE | re.IGNORECASE,
)
_DATABASE_URL = re.compile(r"""://([^\s/:@"'<>\\]{0,256}):(?P<password>[^\s"'<>\\]{1,256})@(?=[\w.\[%$\{-])""")
_DATABASE = re.compile(
    r"(?i)\b(?:postgres(?:ql)?|mysql|mariadb|mongodb|rediss?|amqps?|mssql|oracle|cockroachdb|clickhouse|ldaps?|smtps?"
    r"|ftps?|sftp)(?:\+\w{1,20})?\Z"
)


def in_places(text: str, at: int) -> Span | None:
    """The secret that the name with a word of ``WORDS`` at ``at`` gives away, if it stands in such a place."""
    match = _PLACE.match(text, at)
    if match is None:
        return None
    if match["quote"]:
        span = _quoted(text, match.end(), match["quote"])
        if span is None or not _is_word(text[slice(*span)], 7 if match["sign"] else 8):
            return None
        if match["space"] and not name_before(text, at).startswith("--"):
            return None  # an option is named so, or a person says ``pass "it" as an argument``
        return span if _is_secret_name(text, match) and (match["end"] or _opens(text, match)) else None
    if match["tag"]:
        found = _IN_TAG.match(text, match.end())
        return found.span() if found and is_strong(found[0], at_least=6) and _is_secret_name(text, match) else None
    if match["sign"] and match["word"].lower() == "auth" and (pair := _pair(text, at)):
        return pair
    return None if match["end"] else _unquoted(text, match)


def in_statements(text: str, lower: bytes) -> list[Span]:
    """Passwords behind ``IDENTIFIED BY``, and in URLs of databases, where any sign may be in them."""
    found: list[Span] = []
    if b"identified " in lower:
        for match in _SQL.finditer(text):
            span = _quoted(text, match.end(), match["quote"])
            if span and is_strong(text[slice(*span)], at_least=6):
                found.append(span)
    if b"://" in lower:
        for match in _DATABASE_URL.finditer(text):
            password = match["password"]
            known = is_dummy(password) or password == match[1] or is_code(password)
            if not known and _DATABASE.search(text, max(0, match.start() - 40), match.start()):
                found.append(match.span("password"))
    return found


def _pair(text: str, at: int) -> Span | None:
    """``auth=("user", "password")``."""
    match = _PAIR.match(text, at)
    span = _quoted(text, match.end(), match["quote"]) if match else None
    if match is None or span is None:
        return None
    password = text[slice(*span)]
    return span if password != match["user"] and is_strong(password, at_least=7) else None


def _quoted(text: str, start: int, quote: str) -> Span | None:
    """From ``start`` to the closing quote; a quote behind one more backslash is a part of the value."""
    at = start
    stop = min(len(text), start + _LONGEST_VALUE)
    while (end := text.find(quote, at, stop)) >= 0:
        if end > start and text[end - 1] == "\\":
            at = end + len(quote)
            continue
        return (start, end) if end > start else None
    return None


def _opens(text: str, match: re.Match[str]) -> bool:
    """Whether the quote opens a text. One behind ``"... token: `` closes the text that the name stands in."""
    if text[match.end()] not in "+),;]}.":
        return True
    line = text.rfind("\n", max(0, match.start() - _LONGEST_LINE), match.start())
    before = text[max(line, 0) : match.start()]
    return (line >= 0 or match.start() < _LONGEST_LINE) and before.count(match["quote"]) % 2 == 0


def _is_word(value: str, at_least: int) -> bool:
    """Whether what stands in quotes is a secret without spaces; a backslash is that of an escape."""
    return " " not in value and is_strong(value.replace("\\", ""), at_least=at_least)


def _unquoted(text: str, match: re.Match[str]) -> Span | None:
    run = _RUN.match(text, match.end())
    if run is None:
        return None
    if match["said"]:
        return _said(text, run, match)
    value, sign, name = run[0], match["sign"], name_before(text, match.start()) + match["word"]
    start = match.start() + len(match["word"]) - len(name)
    if (
        sign == "="
        and match["word"][:1] in "pP"
        and text[start - 1 : start] == ";"
        and _ACCOUNT.search(text, max(0, start - _LONGEST_LINE), start)
    ):
        field = _TO_SEMICOLON.match(text, match.end())
        return field.span() if field and not is_code(field[0]) and not is_dummy(field[0]) else None
    end = run.end()
    if sign == "=" and not _VARIABLE.match(name) and (next_field := _NEXT_FIELD.search(value)):
        value, end = value[: next_field.start()], run.start() + next_field.start()
    if not is_strong(value, at_least=6 if sign == "=" else 8):
        return None
    before = text[max(0, start - _LONGEST_LINE) : start]
    lead = _LINE_START.search(before)
    if match["space"]:
        told = (lead and (lead["lead"] or "").strip() == "ENV") or _COMMAND.search(before)
        return run.span() if told and _is_secret_name(text, match) else None
    if sign == "=" and _INVENTORY.match(name):
        return run.span()
    if sign == ":" and _CLOSED.match(text, run.end()):
        header = "-" in name and _HEADER.search(name)
        whole = before[-1:] in ("'", '"') and match["word"].lower() != "auth"
        return run.span() if header or (whole and _is_secret_name(text, match)) else None
    ends = end < run.end() or _LINE_ENDS.match(text, end) is not None
    if not (lead and (ends or (sign == "=" and (lead["lead"] or _VARIABLE.match(name))))):
        return None
    return (run.start(), end) if _is_secret_name(text, match) and _is_line_value(value, name) else None


def _is_line_value(value: str, name: str) -> bool:
    """Whether the rest of a line, ``name=value`` or ``name: value``, is a secret, of which ``is_strong`` is true."""
    if _VARIABLE.match(name) or name.lower().endswith("_auth"):
        return True
    # A program has such lines too, with the name of something else as the value.
    if value.endswith((",", "(", "[", "{")) and not is_noise(value):
        return False
    return is_random(value) or not ("_" in value and value.isidentifier() and value == value.lower())


def _said(text: str, run: re.Match[str], match: re.Match[str]) -> Span | None:
    """``My API key is ...``, in a sentence."""
    value, word = run[0].rstrip(".,;:)"), match["word"].lower()
    if word not in _TOLD or not is_strong(value):
        return None
    if word == "key" and not _KIND_OF_KEY.search(text, max(0, match.start() - 10), match.start()):
        return None
    mixed = value != value.lower() and value != value.upper()
    if value.isalnum() and not (word.startswith("pass") or mixed or len(value) >= 12):
        return None
    return (run.start(), run.start() + len(value))


def _is_secret_name(text: str, match: re.Match[str]) -> bool:
    """Whether a secret may be called so; ``key`` and ``token`` alone are too many other things."""
    word, name = match["word"].lower(), name_before(text, match.start()) + match["word"]
    variable = _VARIABLE.match(name) is not None
    if match["suffix"][:1].lower() == "s" and not variable:
        return False
    if word == "key":
        return _SECRET_KEY.search(name) is not None
    if word == "token":
        return _OTHER_TOKEN.search(name) is None
    if word in _SHORT:
        return _OTHER_NAME.search(name) is None
    return word != "authorization"


def name_before(text: str, end: int) -> str:
    """What of a name, dots included, stands before ``end``; the ``n`` of an escaped line end is no part of it."""
    start = max(0, end - LONGEST_NAME)
    found = _NAME.match(text[start:end][::-1])
    name = found[0][::-1] if found else ""
    at = end - len(name)
    return name[1:] if name[:1] in ("n", "r", "t") and text[at - 1 : at] == "\\" and at > 0 else name
