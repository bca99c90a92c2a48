"""Finds secrets in text: text with the shape of a key, and values assigned to a name of a secret.

A name alone is not enough, or half of all source code would be secret: ``token = tokenizer(text)``, ``password: str``
and ``max_tokens=512`` stay. Next to an ordinary name the value must look generated (letters and digits, no path, no
call, no other name); in an environment dump and in a header nearly any value is taken. A password of several words is
taken in quotes only, and only when none of them is one of which messages and labels are made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Literal

from openhands_rl_plugin.core.secret_places import in_places, in_statements, name_before
from openhands_rl_plugin.core.secret_values import (
    DOTTED,
    PATH,
    PLACEHOLDER,
    REFERENCE,
    UPPER,
    has_random_part,
    is_dummy,
    is_generated,
    is_login,
    is_phrase,
    is_random,
)

Span = tuple[int, int]

SHORTEST_OWN = 8
"""Shorter values of the process's own variables are left alone: they would be found inside ordinary words."""
_LONGEST_OWN_WORD = 11  # "postgres" and "undefined" are values too, and they are in everybody's text

_SHORTEST_RUN = 20
_RUN = b"a" * _SHORTEST_RUN
_RUN_MAP = bytes(
    ord("a") if byte < 128 and (chr(byte).isalnum() or chr(byte) in "_-.") else ord(" ") for byte in range(256)
)

_NO_NAME = re.compile(r"[A-Z0-9]")  # most long runs are names of lower-case words, which need no closer look
_SHAPES = re.compile(
    r"""(?<![A-Za-z0-9_])(?:
        (?P<prefixed>(?:sk-|hf_|gsk_|r8_|xai-|nvapi-|tvly-|pplx-|npm_|pypi-|dop_v1_|glpat-|lin_api_|figd_|ATATT
            |hv[sbr]\.|dp\.[a-z]{2,5}\.)[\w-]{17,})
      | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,}
      | A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16}(?![A-Za-z0-9])
      | AIza[\w-]{35}(?![\w-]) | ya29\.[\w.-]{16,} | GOCSPX-[\w-]{20,}
      | xox[abeoprs]-[A-Za-z0-9-]{10,} | xapp-[A-Za-z0-9-]{15,}
      | [rs]k_(?:live|test)_[A-Za-z0-9]{10,} | whsec_[A-Za-z0-9]{14,}
      | SG\.[\w-]{16,}\.[\w-]{16,}
      | eyJ[\w-]{6,}\.eyJ[\w-]{6,}(?:\.[\w-]*)?
      | (?:dapi|(?<!-)key-|SK|shp(?:at|ca|pa|ss)_)[0-9a-f]{32}(?![A-Za-z0-9])
      | AGE-SECRET-KEY-1[0-9A-Z]{40,} | (?<=[0-9]{8}:)AA[\w-]{32,33}(?![\w-])
      | (?:[MNO][DTjz][AEIMQUYcgk][w-z0-5]){5,6}[\w-]{0,4}\.[\w-]{6}\.[\w-]{27,}  # digits in base64: a bot of Discord
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
_URL_PASSWORD = re.compile(r"://(?P<user>[^\s/@:\"'<>\\]{0,256}):(?P<password>[^\s/@\"'<>{}$\[\]\\]{1,512})@")
_WEBHOOK = re.compile(r"hooks\.slack\.com/services/([A-Za-z0-9/]{20,})")
_BEARER = re.compile(r"earer ([A-Za-z0-9._~+/-]{16,}=*)")

_COOKIES = re.compile(r"""(?i)cookie\\*["']?[ \t]{0,3}[:,][ \t]{0,3}b?(?:\\*["'])?([^\r\n"'\\]{1,4096})""")
_COOKIE = re.compile(r"(?<![^\s;:\"'])([^\s=;,]{1,128})=([^\s=;,]{8,}+=*)")
_COOKIE_ATTRIBUTES = frozenset({"path", "domain", "expires", "max-age", "samesite"})
_DIGEST = re.compile(
    r"""authorization\\*["']?[ \t]{0,3}[:,=][ \t]{0,3}b?\\*["']?digest[ ]
        [^\r\n]{0,600}?[\s,]response=\\*["']?([0-9a-f]{32,128})""",
    re.VERBOSE | re.IGNORECASE,
)
_SIGNED_URL = re.compile(r"(?:[?&;]|u0026)(?:sig|X-(?:Amz|Goog)-Signature)=([A-Za-z0-9%+/_-]{20,}=*)")
_NETRC_SPACE = r"(?:\s|\\n)++"
_NETRC = re.compile(
    rf"(?:machine{_NETRC_SPACE}[^\s\\]{{1,256}}|default){_NETRC_SPACE}login{_NETRC_SPACE}[^\s\\]{{1,256}}{_NETRC_SPACE}\Z"
)
_NETRC_PASSWORD = re.compile(rf"password{_NETRC_SPACE}([^\s\\\"']{{1,512}})")
# Options of single letters mean this to a few programs only, which stand before them on the same line.
_CURL_LOGIN = re.compile(
    r"""(?<=\s)(?:-u|--user|--proxy-user)[ =]?\\*["']?([^\s:"'$<>{}\\]{1,128}):([^\s"'$<>{}\\]{4,512})"""
)
_SHORT_PASSWORD = re.compile(r"""(?<=\s)-p\\*["']?([^\s"'$<>{}\\=-][^\s"'$<>{}\\]{3,512})""")
_LONGEST_COMMAND = 600
_COMMAND_ENDS = re.compile(r"(?<!\\)\n|[;|]")

_NAME_WORDS = (b"key", b"token", b"secret", b"pass", b"credential", b"auth", b"pwd", b"_pat")
_FOLLOWS = frozenset({*(bytes([byte]) for byte in b" \t\r\n\"'\\=:,_>]s0123456789wpo")})
"""What may stand behind a word of a name; nearly all of a program's text is left at once."""
_SUFFIX = r"s?(?:_?[0-9]{1,3}|_(?:old|new|prod|production|staging|dev|test|live|backup|primary|secondary|default|b64))?"
_ASSIGNED = re.compile(
    rf"""(?P<option>(?<=-))?(?P<word>key|token|secret|password|passwd|passphrase|pass|pwd|_pat|credentials?|authorization|auth)
        (?=[\s"'\\=:,_s0-9])(?P<suffix>(?>{_SUFFIX}))(?P<end>\\*["'])?(?P<before>[ \t]{{0,3}})
        (?P<sign>=>|=|:|,?(?:\s|\\n){{1,20}}\\*["']?value\\*["']?:|,|(?(option)(?<=[ \t])|(?!)))(?P<after>[ \t]{{0,3}})
        (?P<open>b?\\*["'])?(?P<scheme>(?:bearer|basic|token|apikey)[ ]+)?
        (?P<value>[^\s"'`\\,;&<>(){{}}\[\]$|=:]{{4,}}+)""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
# A value may continue after a ``:`` or ``=``; checked only once its beginning is taken for a secret, or many of them in
# a row would take quadratic time.
_REST = re.compile(r"""[^\s"'`\\,;&<>(){}\[\]$|]*+""")
_REST_OF_LIST = re.compile(r"""[^\s"'`\\;&<>(){}\[\]$|]*+""")
_PHRASE = re.compile(r"""[^\n"'\\$<>{}]{4,100}(?=\\*["'])""")
_CREDENTIAL_KEY = re.compile(
    r"(?i)(?:api|secret|access|private|auth|account|subscription|sign(?:ing)?|encrypt(?:ion)?|master|deploy|license)"
    r"[_-]?key\Z"
)
_ANY_KEY = re.compile(r"(?i)key\Z")
_PASSWORD = re.compile(r"(?i)(?:secret|password|passwd|passphrase)\Z")
_HEADER = re.compile(r"(?i)(?:x-(?:[a-z]+-)*(?:key|token|secret)|api-key)\Z")
_PASSWORD_NAME = re.compile(r"(?i)(?:\A|[_-])(?:password|passwd|passphrase|pwd)\Z|PASSWORD\Z")
_PART_OF_A_WORD = re.compile(r"(?i)[a-z](?:pass|pwd|auth)\Z")
_ACCOUNT = re.compile(r"(?i)(?:uid|user id|username|user)=[^;\n]{1,128};(?:[^;\n]{1,128};)*\Z")
_VARIABLE = re.compile(r"_?[A-Z][A-Z0-9_]*\Z")
_SECRET_VARIABLE = re.compile(
    rf"(?i)(?:key|token|secret|password|passwd|passphrase|credential|(?:\A|_)pass|_pwd|_pat)(?P<suffix>{_SUFFIX})\Z"
)

_PADDING = re.compile("={0,2}")


def find_secrets(text: str, own: Sequence[str] = ()) -> list[Span]:
    """Where secrets stand in ``text``, in order; the spans may overlap. ``own`` are texts that are secrets anyway."""
    # One byte a character, so that a place is the same number in both.
    plain = text.encode("ascii", "replace")
    return sorted({*_with_known_shape(text, plain), *_marked(text), *_named(text, plain.lower()), *_own(text, own)})


def is_secret_item(name: str, value: str) -> bool:
    """Whether ``value``, as the item ``name`` of a JSON object, is a secret."""
    if not names_anything(name):
        return False
    if _PASSWORD_NAME.search(name) and len(value) >= 4:
        return not PLACEHOLDER.match(value) and not REFERENCE.match(value)
    item = f'"{name}": "{value}"'
    start = len(item) - len(value) - 1
    return any(span[0] >= start for span in _named(item, item.encode("ascii", "replace").lower()))


def own_secrets(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The values of variables whose names say that they are secret, also as JSON writes them.

    Left out are paths, values that are too short, and single words, which everybody's text may hold.
    """
    values = {value for name in environ if (kind := _kind_of_secret(name)) for value in _values(environ[name], kind)}
    long = {value for value in values if len(value) >= SHORTEST_OWN and PLACEHOLDER.match(value) is None}
    words = {value for value in long if len(value) <= _LONGEST_OWN_WORD and value.isalpha()}
    found = {value for value in long - words if not PATH.match(value) or is_random(value)}
    return tuple(found | {value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for value in found})


def _values(value: str, kind: str) -> tuple[str, ...]:
    """``value``, and if it may be a list, which of its parts are secrets; a plain number of tokens is none."""
    if kind == "one":
        return (value,)
    return tuple(part for part in (value, *re.split(r"[,;\s]+", value)) if is_generated(part, at_least=SHORTEST_OWN))


@lru_cache(maxsize=4096)
def _kind_of_secret(name: str) -> Literal["", "one", "many"]:
    """Whether a variable of that name holds no secret, one, or many."""
    match = _SECRET_VARIABLE.search(name)
    if match is None:
        return ""
    return "many" if match["suffix"][:1].lower() == "s" else "one"


@lru_cache(maxsize=4096)
def names_anything(name: str) -> bool:
    """Whether a name may be that of a secret at all."""
    lower = name.lower().encode("ascii", "replace")
    return any(word in lower for word in _NAME_WORDS) or b"cookie" in lower


def _with_known_shape(text: str, plain: bytes) -> Iterator[Span]:
    runs = plain.translate(_RUN_MAP)
    at = runs.find(_RUN)
    while at >= 0:
        end = runs.find(b" ", at)
        end = len(runs) if end < 0 else end
        if _NO_NAME.search(text, at, end):
            for match in _SHAPES.finditer(text, at, end):
                if match["prefixed"] is None or has_random_part(match["prefixed"]):
                    yield match.span()
        at = runs.find(_RUN, end)


def _marked(text: str) -> Iterator[Span]:
    """Secrets that something around them gives away."""
    if "PRIVATE KEY" in text:
        yield from (match.span() for match in _PRIVATE_KEY.finditer(text))
    if "://" in text:
        yield from (match.span(1) for match in _WEBHOOK.finditer(text))
        yield from (
            match.span("password")
            for match in _URL_PASSWORD.finditer(text)
            if not is_dummy(match["password"]) and match["password"] != match["user"]
        )
        yield from (match.span(1) for match in _SIGNED_URL.finditer(text) if has_random_part(match[1]))
    if "earer " in text:
        yield from (
            match.span(1)
            for match in _BEARER.finditer(text)
            if is_generated(match[1], at_least=16) and not is_dummy(match[1])
        )
    if "curl" in text or "mysql" in text:
        yield from _in_commands(text)


def _in_commands(text: str) -> Iterator[Span]:
    for match in _CURL_LOGIN.finditer(text):
        same = match[1] == match[2] or PLACEHOLDER.match(match[2])  # ``me:me`` is a default
        if not same and _is_of_command("curl", text, match.start()):
            yield match.span(2)
    for match in _SHORT_PASSWORD.finditer(text):
        word = PLACEHOLDER.match(match[1]) or match[1].isdigit() or PATH.match(match[1])
        if not word and _is_of_command("mysql", text, match.start()):
            yield match.span(1)


def _is_of_command(command: str, text: str, at: int) -> bool:
    """Whether ``command`` stands before ``at``, and ends only behind it."""
    start = text.rfind(command, max(0, at - _LONGEST_COMMAND), at)
    return start >= 0 and not _COMMAND_ENDS.search(text, start, at)


def _own(text: str, own: Sequence[str]) -> Iterator[Span]:
    for secret in own:
        at = text.find(secret)
        while at >= 0:
            yield at, at + len(secret)
            at = text.find(secret, at + len(secret))


def _named(text: str, lower: bytes) -> Iterator[Span]:
    """Secrets that a name gives away."""
    return chain(_assigned(text, lower), _cookies(text, lower), in_statements(text, lower))


def _cookies(text: str, lower: bytes) -> Iterator[Span]:
    at = lower.find(b"cookie")
    while at >= 0:
        header = _COOKIES.match(text, at)
        at = lower.find(b"cookie", header.end() if header else at + 1)
        for match in _COOKIE.finditer(text, *header.span(1)) if header else ():
            if match[1].lower() not in _COOKIE_ATTRIBUTES and is_generated(match[2], at_least=8):
                yield match.span(2)


def _assigned(text: str, lower: bytes) -> Iterator[Span]:
    for word in _NAME_WORDS:
        at = lower.find(word)
        while at >= 0:
            if word in (b"auth", b"pass") and (other := _in_other_words(text, at)):
                yield other
            if lower[at + len(word) : at + len(word) + 1] not in _FOLLOWS:
                at = lower.find(word, at + len(word))
                continue
            if place := in_places(text, at):
                yield place
                at = lower.find(word, max(at + len(word), place[1]))
                continue
            match = _ASSIGNED.match(text, at)
            at += len(word)
            if match is not None and (end := _end_of_secret(text, match)):
                yield match.start("value"), (at := end)
            at = lower.find(word, at)


def _in_other_words(text: str, at: int) -> Span | None:
    """In ``Authorization: Digest``, or behind ``machine HOST login NAME``."""
    match, start = _DIGEST.match(text, at), max(0, at - _LONGEST_COMMAND)
    if text.startswith("password", at) and text.find("login", start, at) >= 0 and _NETRC.search(text, start, at):
        match = _NETRC_PASSWORD.match(text, at)
    return match.span(1) if match and not PLACEHOLDER.match(match[1]) else None


def _end_of_secret(text: str, match: re.Match[str]) -> int | None:
    """The end of the assigned value, if it is a secret."""
    if match["open"] and match["sign"] in ("=", ":") and match["word"].lower().startswith("p"):
        phrase = _PHRASE.match(text, match.start("value"))
        if phrase and " " in phrase[0].strip() and is_phrase(phrase[0]):
            return phrase.end()
    if not _is_secret(text, match):
        return None
    rest = (_REST_OF_LIST if match["suffix"][:1].lower() == "s" else _REST).match(text, match.end())
    return rest.end() if rest else match.end()


def _is_secret(text: str, match: re.Match[str]) -> bool:
    """Whether an assigned value is a secret: by the name, by how it is written, and by the value."""
    value, sign, word = match["value"], match["sign"], match["word"].lower()
    quoted = match["open"] is not None
    padded = _PADDING.match(text, match.end())
    follows = text[padded.end() : padded.end() + 1] if padded and sign == ":" else text[match.end() : match.end() + 1]
    whole = not follows or follows in " \t\r\n\"'\\;&"
    if PLACEHOLDER.match(value) or (whole and is_dummy(value)) or (follows and follows in "([{"):
        return False
    if quoted and (not follows or follows not in "\"'\\=:"):
        return False  # more than one word
    name = name_before(text, match.start()).rpartition(".")[2] + match["word"]
    if not sign:
        return _is_value_of_option(name, value)
    if sign == ",":  # a pair of texts, or only two of a list
        pair = bool(quoted and match["end"] and not match["suffix"])
        return pair and bool(match["scheme"] or is_generated(value, at_least=8))
    if word in ("auth", "_pat"):
        return is_login(value) if word == "auth" else is_random(value)
    if match["end"] and not quoted and not match["scheme"]:
        return False  # a variable in a program
    if (match["scheme"] and word == "authorization") or _HEADER.match(name):
        return len(value) >= 6 and not DOTTED.match(value)
    spaced = bool(match["before"] or (match["after"] and sign == "="))
    line_ends = not follows or follows in "\n\r\\"
    variable = _VARIABLE.match(name) and not spaced and (sign == "=" or quoted or line_ends)
    if word in ("pass", "pwd"):
        return _is_value_of_short_name(text, match, name, variable=bool(variable), quoted=quoted)
    if match["suffix"] and not (variable and match["suffix"][:1] not in "sS"):
        return bool(_CREDENTIAL_KEY.search(name) or not _ANY_KEY.search(name)) and is_random(value)
    if variable:
        return _is_value_of_variable(name, value)
    if sign == "=" and not spaced and word == "password" and _is_in_connection(text, match.start()):
        return not DOTTED.match(value)
    if _ANY_KEY.search(name) and not _CREDENTIAL_KEY.search(name):
        return False
    if quoted or (sign != "=" and line_ends):
        return is_generated(value, at_least=7)
    return sign == "=" and (is_random(value) or (not spaced and "_" not in value and is_generated(value, at_least=7)))


def _is_value_of_option(name: str, value: str) -> bool:
    """In ``--name value``."""
    any_key = _ANY_KEY.search(name) and not _CREDENTIAL_KEY.search(name)
    if any_key or not name.startswith("--") or value.startswith("-") or _PART_OF_A_WORD.search(name):
        return False
    return is_generated(value, at_least=6 if _PASSWORD.search(name) else 8)


def _is_value_of_short_name(text: str, match: re.Match[str], name: str, *, variable: bool, quoted: bool) -> bool:
    """``pass`` and ``pwd`` are parts of other words, and words of a program or a shell themselves."""
    value, before = match["value"], name[: -len(match["word"])]
    if before[-1:].isalpha() or (PATH.match(value) and not is_random(value)):
        return False
    if not before:
        mixed = quoted and "_" not in value and bool(UPPER.search(value)) and is_generated(value, at_least=7)
        return mixed or (match["sign"] == "=" and not quoted and _is_in_connection(text, match.start()))
    if variable:
        return is_generated(value, at_least=6) or (len(value) >= 12 and not value.isdigit())
    return quoted and is_generated(value, at_least=7)


def _is_in_connection(text: str, at: int) -> bool:
    """Whether the text at ``at`` is one of the fields ``;name=value`` with which a database is opened."""
    return text[at - 1 : at] == ";" and _ACCOUNT.search(text[max(0, at - 256) : at]) is not None


def _is_value_of_variable(name: str, value: str) -> bool:
    """In ``NAME=value`` of an environment dump; keys and tokens may be of other kinds (``EOS_TOKEN``, ``SORT_KEY``)."""
    if PATH.match(value) and not is_random(value):
        return False
    if _PASSWORD.search(name):
        return True
    credential = _CREDENTIAL_KEY.search(name) or not _ANY_KEY.search(name)
    return is_generated(value, at_least=8) or (bool(credential) and len(value) >= 12 and not value.isdigit())
