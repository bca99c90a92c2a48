"""What a secret's value looks like: generated, and neither a path, a name in a program, a reference nor a dummy."""

from __future__ import annotations

import base64
import binascii
import re

LETTER, DIGIT, UPPER = re.compile(r"[A-Za-z]"), re.compile(r"\d"), re.compile(r"[A-Z]")
UNBROKEN = re.compile(r"(?=[A-Za-z]*\d)[A-Za-z0-9]{16}")
DOTTED = re.compile(r"\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+\Z")
PATH = re.compile(r"(?:~|\.{0,2})/[\w.-]+(?:/[\w.-]+)*/?\Z")
PLACEHOLDER = re.compile(
    r"(?i)(?:your|insert|replace|redacted|changeme|placeholder|(?:dummy|fake|mock)[-_]|0x(?![0-9a-f]{32})|%(?:[({]|[sdr]\b|[a-z_]*%\Z))|(?:x{3,}|\*+|\.{3,}|none|null|true|false|undefined"
    r"|required|optional|string|pass|passwd|pwd|password|secret|token|key)\Z"
)
NOT_OF_A_PHRASE = re.compile(
    r"(?i)\b(?:\w*pass\w*|\w*word|the|an?|is|are|was|be|been|can|could|must|may|should|will|do|does|not|no|or|and|of|for"
    r"|from|in|on|to|too|with|at|by|if|your?|my|user|enter|type|new|old|confirm|repeat|forgot\w*|required|optional"
    r"|invalid|incorrect|wrong|weak|short|long|min\w*|max\w*|missing|empty|blank|value|field|text|string|characters?"
    r"|length|hash\w*|error|failed|default|here|example|some|any|none)\b"
)
REFERENCE = re.compile(r"[$<{\[%]")
_CODE_WHOLE = re.compile(
    r"""--?[a-z]+|\$[A-Za-z_]+\Z|\$[A-Z_]+\b|\^.*\$\Z|<[^<>]*>|<\||\[[\w ]*\]|%\w+%\Z
    |[A-Za-z_](?:[\w.]*\w)?(?:[(\[](?!\])[\w.,:=*()\[\]-]*\Z|(?:==|!=|<=|>=))""",
    re.VERBOSE,
)
_CODE_INSIDE = re.compile(
    r"""://|</|/>|%[sdr]\b|%\(\w+\)|\{[\w.!: -]*\}|\$(?:\{|\(\w)|\\[dswb]
    |\(\?[:P=!]|\[(?:\^|a-z|A-Z|0-9|redacted\])|\w\(\)""",
    re.VERBOSE,
)
"""Expressions, patterns, options and references to values that stand elsewhere."""
_LONGEST_LOOK = 96
DUMMY = re.compile(
    r"(?i)(?:tiger|pass(?:wd|word|phrase|code)?|pwd?|secrets?|tests?|testing|(?:test|fake|dummy|mock)(?:pass|password|secret|key|token|user)"
    r"|admin|root|postgres|mysql|mongo(?:db)?|redis|guest|user(?:name)?|bar|baz|foo(?:bar)?|qux|spam|eggs|example|sample"
    r"|change[_-]?(?:me|it)|letmein|qwerty|abc(?:123|def)?|123(?:4(?:5(?:6(?:7(?:89?0?)?)?)?)?)?|docker|minio(?:admin)?"
    r"|rabbitmq|airflow|dummy|fake|my[_-]?(?:secret[_-]?)?(?:pass|password|pw|secret|token|key)|token|key|api_?key|me"
    # From the RFCs of OAuth and HTTP.
    r"|sk-1234|h480djs93hd8|2YotnFZFEjr1zCsicMWpAA|tGzv3JOkF0XG5Qx2TlKWIA|mF_9\.B5f-4\.1JqM|SlAV32hkKG|A3ddj3w"
    r"|czZCaGRSa3F0Mzp(?:nWDFmQmF0M2JW|3MDFmQmF0M2JW)|QWxhZGRpbjpvcGVuIHNlc2FtZQ==?|open sesame"
    r"|p@?ss|p@ssw(?:or|0r)d\d?|pass(?:word)?[_-]?1?2?3?4?|hello|world|demo|default|none|null|\w{1,2}|x+|y+|z+|\W+)\Z"
)
"""Passwords of documentations and of servers as they are delivered."""
CAMEL = re.compile(r"(?:[A-Z]{0,3}\d?[A-Z]?[a-z]{3,}\d{0,2}){3,}\Z")
"""The name of a class."""
_SIGN = re.compile(r"[!@#$%^&*?~+]")
_SIGNS = frozenset("!@#%^&*?~+;<>|")
_LOWER = re.compile(r"[a-z]")


def is_login(value: str) -> bool:
    """Whether ``value`` is the Base64 form of ``name:password``; its padding may be missing."""
    try:
        written = base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
    except binascii.Error:
        return False
    return len(written) >= 6 and b":" in written and written.isascii() and written.decode("ascii").isprintable()


def is_phrase(value: str) -> bool:
    """Whether a text of more than one word may be a password; messages and labels are none."""
    return not (value[:1].isupper() and value.replace(" ", "").isalpha()) and not NOT_OF_A_PHRASE.search(value)


def is_generated(value: str, *, at_least: int) -> bool:
    """Letters and digits, and neither a path nor a name in a program."""
    return (
        len(value) >= at_least
        and bool(LETTER.search(value) and DIGIT.search(value))
        and not DOTTED.match(value)
        and not CAMEL.match(value)
        and not (PATH.match(value) and not is_random(value))
    )


def is_random(value: str) -> bool:
    """As ``is_generated``, but unlike any name of a variable or a file."""
    return has_random_part(value) and len(value) >= 16 and not DOTTED.match(value)


def has_random_part(value: str) -> bool:
    return bool(DIGIT.search(value)) and bool(UPPER.search(value) or UNBROKEN.search(value))


def is_dummy(value: str) -> bool:
    """Whether everybody knows ``value``, or it only stands for a secret."""
    known = PLACEHOLDER.match(value) or DUMMY.match(value) or "EXAMPLE" in value
    return bool(known) and not is_noise(value)


def is_code(value: str) -> bool:
    """Whether a value is a part of a program, or refers to a value that stands elsewhere."""
    if value.isalnum():
        return False
    start = value[:_LONGEST_LOOK]
    found = _CODE_WHOLE.match(start) or _CODE_INSIDE.search(start)
    return value.startswith("<|") or (found is not None and not is_noise(value))


def is_noise(value: str) -> bool:
    """Whether there are more kinds of signs among digits and letters than in any expression of that length."""
    return 12 <= len(value) <= 80 and len(set(value) & _SIGNS) >= 3 and "redacted" not in value


def is_strong(value: str, *, at_least: int = 8) -> bool:
    """Whether a whole value, signs included, is a secret: for places where only a secret can stand.

    Letters and digits; or both cases of letters and one of the signs that passwords have. No expression of a program.
    """
    if len(value) < at_least or not LETTER.search(value):
        return False
    if not DIGIT.search(value) and not (_SIGN.search(value) and UPPER.search(value) and _LOWER.search(value)):
        return False
    if is_dummy(value) or DOTTED.match(value) or CAMEL.match(value) or is_code(value):
        return False
    return is_random(value) or not PATH.match(value)
