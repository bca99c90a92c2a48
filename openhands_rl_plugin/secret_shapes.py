"""Finds secrets in text: what has the shape of a key, and what is assigned to a name that says so.

A name alone is not enough, or half of all source code would be secret: ``token = tokenizer(text)``, ``password: str``
and ``max_tokens=512`` stay. Next to an ordinary name the value must look generated (letters and digits, no path, no
call, no other name); in an environment dump and in a header nearly any value is taken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

Span = tuple[int, int]

SHORTEST_OWN = 8
"""Shorter values of the process's own variables are left alone: they would be found inside ordinary words."""
_LONGEST_OWN_WORD = 11  # "postgres" and "undefined" are values too, and they are in everybody's text

_SHORTEST_RUN = 20
_RUN = b"a" * _SHORTEST_RUN
_RUN_MAP = bytes(
    ord("a") if byte < 128 and (chr(byte).isalnum() or chr(byte) in "_-.") else ord(" ") for byte in range(256)
)

_SHAPES = re.compile(
    r"""(?<![A-Za-z0-9_])(?:
        (?P<prefixed>(?:sk-|hf_|gsk_|r8_|xai-|nvapi-|tvly-|pplx-|npm_|pypi-|dop_v1_|glpat-)[\w-]{17,})
      | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,}
      | A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16}(?![A-Za-z0-9])
      | AIza[\w-]{35}(?![\w-]) | ya29\.[\w.-]{16,} | GOCSPX-[\w-]{20,}
      | xox[abeoprs]-[A-Za-z0-9-]{10,} | xapp-[A-Za-z0-9-]{15,}
      | [rs]k_(?:live|test)_[A-Za-z0-9]{10,} | whsec_[A-Za-z0-9]{14,}
      | SG\.[\w-]{16,}\.[\w-]{16,}
      | eyJ[\w-]{6,}\.eyJ[\w-]{6,}(?:\.[\w-]*)?
    )""",
    re.VERBOSE | re.ASCII,
)
# Escaped line ends are those of JSON inside of text.
_PRIVATE_KEY = re.compile(
    r"""-----BEGIN\ [A-Z0-9 ]{0,40}PRIVATE\ KEY(?:\ BLOCK)?-----
        (?:(?:\s|\\+[nr])*+[A-Za-z-]{1,40}:\ [^\n\\]{0,200})*+
        (?:\s|\\+[nr])*+[A-Za-z0-9+/=]{16}(?:[A-Za-z0-9+/=\s]|\\+[nr])*+
        (?:-----END\ [A-Z0-9 ]{0,40}PRIVATE\ KEY(?:\ BLOCK)?-----)?""",
    re.VERBOSE,
)
_URL_PASSWORD = re.compile(r"://[^\s/@:\"'<>\\]{0,256}:([^\s/@\"'<>{}$\[\]\\]{1,512})@")
_WEBHOOK = re.compile(r"hooks\.slack\.com/services/([A-Za-z0-9/]{20,})")
_BEARER = re.compile(r"earer ([A-Za-z0-9._~+/-]{16,}=*)")

_NAME_WORDS = (b"key", b"token", b"secret", b"pass", b"credential", b"authorization")
_LONGEST_NAME = 64
_NAME = re.compile(r"(?:\\[nrt])?(?P<name>[A-Za-z0-9_-]*)\Z")
_ASSIGNED = re.compile(
    r"""(?P<word>key|token|secret|password|passwd|passphrase|credentials?|authorization)
        (?P<end>\\*["'])?(?P<before>[ \t]{0,3})
        (?P<sign>=>|=|:|,?(?:\s|\\n){1,20}\\*["']?value\\*["']?:|,)(?P<after>[ \t]{0,3})
        (?P<open>b?\\*["'])?(?P<scheme>(?:bearer|basic|token|apikey)[ ]+)?
        (?P<value>[^\s"'`\\,;&<>(){}\[\]$|=:]{4,}+)""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
# A value may go on behind a ``:`` or ``=``; looked at only once its beginning is taken for a secret, or many of them in
# a row would take quadratic time.
_REST = re.compile(r"""[^\s"'`\\,;&<>(){}\[\]$|]*+""")
_CREDENTIAL_KEY = re.compile(
    r"(?i)(?:api|secret|access|private|auth|account|subscription|sign(?:ing)?|encrypt(?:ion)?|master|deploy|license)"
    r"[_-]?key\Z"
)
_ANY_KEY = re.compile(r"(?i)key\Z")
_PASSWORD = re.compile(r"(?i)(?:secret|password|passwd|passphrase)\Z")
_HEADER = re.compile(r"(?i)(?:x-(?:[a-z]+-)*(?:key|token|secret)|api-key)\Z")
_VARIABLE = re.compile(r"_?[A-Z][A-Z0-9_]*\Z")
_SECRET_VARIABLE = re.compile(r"(?i)(?:key|token|secret|password|passwd|passphrase|credentials?)\Z")

_LETTER, _DIGIT, _UPPER = re.compile(r"[A-Za-z]"), re.compile(r"\d"), re.compile(r"[A-Z]")
_UNBROKEN = re.compile(r"(?=[A-Za-z]*\d)[A-Za-z0-9]{16}")
_DOTTED = re.compile(r"\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+\Z")
_PATH = re.compile(r"(?:~|\.{0,2})/[\w.-]+(?:/[\w.-]+)*/?\Z")
_PLACEHOLDER = re.compile(
    r"(?i)(?:your|insert|replace|redacted|changeme|placeholder|0x|%)|(?:x{3,}|\*+|\.{3,}|none|null|true|false|undefined"
    r"|required|optional|string|pass|passwd|pwd|password|secret|token|key)\Z"
)


def find_secrets(text: str, own: Sequence[str] = ()) -> list[Span]:
    """Where secrets stand in ``text``, in order; the spans may overlap. ``own`` are texts that are secrets anyway."""
    # One byte a character, so that a place is the same number in both.
    plain = text.encode("ascii", "replace")
    return sorted({*_with_known_shape(text, plain), *_marked(text), *_assigned(text, plain.lower()), *_own(text, own)})


def is_secret_item(name: str, value: str) -> bool:
    """Whether ``value``, as the item ``name`` of a JSON object, is a secret."""
    if not names_anything(name):
        return False
    item = f'"{name}": "{value}"'
    start = len(item) - len(value) - 1
    return any(span[0] >= start for span in _assigned(item, item.encode("ascii", "replace").lower()))


def own_secrets(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The values of variables whose names say that they are secret, also as JSON writes them.

    Left out are paths, values that are too short, and single words, which everybody's text may hold.
    """
    values = {environ.get(name, "") for name in environ if _names_secret(name)}
    long = {value for value in values if len(value) >= SHORTEST_OWN and _PLACEHOLDER.match(value) is None}
    words = {value for value in long if len(value) <= _LONGEST_OWN_WORD and value.isalpha()}
    found = {value for value in long - words if not _PATH.match(value) or _is_random(value)}
    return tuple(found | {value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for value in found})


@lru_cache(maxsize=4096)
def _names_secret(name: str) -> bool:
    return _SECRET_VARIABLE.search(name) is not None


@lru_cache(maxsize=4096)
def names_anything(name: str) -> bool:
    """Whether a name may be that of a secret at all."""
    lower = name.lower().encode("ascii", "replace")
    return any(word in lower for word in _NAME_WORDS)


def _with_known_shape(text: str, plain: bytes) -> Iterator[Span]:
    runs = plain.translate(_RUN_MAP)
    at = runs.find(_RUN)
    while at >= 0:
        end = runs.find(b" ", at)
        end = len(runs) if end < 0 else end
        for match in _SHAPES.finditer(text, at, end):
            if match["prefixed"] is None or _has_random_part(match["prefixed"]):
                yield match.span()
        at = runs.find(_RUN, end)


def _marked(text: str) -> Iterator[Span]:
    """Secrets that something around them gives away."""
    if "PRIVATE KEY" in text:
        yield from (match.span() for match in _PRIVATE_KEY.finditer(text))
    if "hooks.slack.com" in text:
        yield from (match.span(1) for match in _WEBHOOK.finditer(text))
    if "://" in text:
        yield from (match.span(1) for match in _URL_PASSWORD.finditer(text) if not _PLACEHOLDER.match(match[1]))
    if "earer " in text:
        yield from (match.span(1) for match in _BEARER.finditer(text) if _is_generated(match[1], at_least=16))


def _own(text: str, own: Sequence[str]) -> Iterator[Span]:
    for secret in own:
        at = text.find(secret)
        while at >= 0:
            yield at, at + len(secret)
            at = text.find(secret, at + len(secret))


def _assigned(text: str, lower: bytes) -> Iterator[Span]:
    for word in _NAME_WORDS:
        at = lower.find(word)
        while at >= 0:
            match = _ASSIGNED.match(text, at)
            at += len(word)
            if match is not None and _is_secret(text, match):
                rest = _REST.match(text, match.end())
                at = rest.end() if rest else match.end()
                yield match.start("value"), at
            at = lower.find(word, at)


def _is_secret(text: str, match: re.Match[str]) -> bool:
    """Whether what is assigned is a secret: by the name, by how it is written, and by the value."""
    value, sign = match["value"], match["sign"]
    quoted = match["open"] is not None
    follows = text[match.end() : match.end() + 1]
    if _PLACEHOLDER.match(value) or (follows and follows in "([{"):
        return False
    if quoted and (not follows or follows not in "\"'\\=:"):
        return False  # more than one word
    if sign == ",":  # a pair of texts, or only two of a list
        return bool(quoted and match["end"]) and bool(match["scheme"] or _is_generated(value, at_least=8))
    name = _name_before(text, match.start()) + match["word"]
    if match["end"] and not quoted and not match["scheme"]:
        return False  # a variable in a program
    if (match["scheme"] and match["word"].lower() == "authorization") or _HEADER.match(name):
        return len(value) >= 6 and not _DOTTED.match(value)
    spaced = bool(match["before"] or (match["after"] and sign == "="))
    line_ends = not follows or follows in "\n\r\\"
    if _VARIABLE.match(name) and not spaced and (sign == "=" or quoted or line_ends):
        return _is_value_of_variable(name, value)
    if _ANY_KEY.search(name) and not _CREDENTIAL_KEY.search(name):
        return False
    if quoted or (sign != "=" and line_ends):
        return _is_generated(value, at_least=7)
    return sign == "=" and (_is_random(value) or (not spaced and "_" not in value and _is_generated(value, at_least=7)))


def _name_before(text: str, end: int) -> str:
    before = _NAME.search(text, max(0, end - _LONGEST_NAME), end)
    return before["name"] if before else ""


def _is_value_of_variable(name: str, value: str) -> bool:
    """In ``NAME=value`` of an environment dump; keys and tokens may be of other kinds (``EOS_TOKEN``, ``SORT_KEY``)."""
    if _PATH.match(value) and not _is_random(value):
        return False
    if _PASSWORD.search(name):
        return True
    credential = _CREDENTIAL_KEY.search(name) or not _ANY_KEY.search(name)
    return _is_generated(value, at_least=8) or (bool(credential) and len(value) >= 12 and not value.isdigit())


def _is_generated(value: str, *, at_least: int) -> bool:
    """Letters and digits, and neither a path nor a name in a program."""
    return (
        len(value) >= at_least
        and bool(_LETTER.search(value) and _DIGIT.search(value))
        and not _DOTTED.match(value)
        and not (_PATH.match(value) and not _is_random(value))
    )


def _is_random(value: str) -> bool:
    """As ``_is_generated``, but such as nobody would give to a variable or a file."""
    return _has_random_part(value) and len(value) >= 16 and not _DOTTED.match(value)


def _has_random_part(value: str) -> bool:
    return bool(_DIGIT.search(value)) and bool(_UPPER.search(value) or _UNBROKEN.search(value))
