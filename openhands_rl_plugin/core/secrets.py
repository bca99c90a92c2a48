"""Finds secrets in text: text with the shape of a key, and values assigned to a name of a secret.

A name alone is not enough, or half of all source code would be secret: ``token = tokenizer(text)``, ``password: str``
and ``max_tokens=512`` stay. Where only a secret can stand (a quoted value, the line of an environment dump, a header)
nearly any value is taken, signs included; elsewhere the value must look generated: letters and digits, no path, no
call, no other name. A password of several words is taken in quotes only, and only when none of them is one of which
messages and labels are made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from pydantic_core import SchemaValidator, core_schema

Span = tuple[int, int]

SHORTEST_OWN = 8
"""Shorter values of the process's own variables are left alone: they would be found inside ordinary words."""
_LONGEST_OWN_WORD = 11  # "postgres" and "undefined" are values too, and they are in everybody's text

_SHAPED = r"""
        (?P<prefixed>(?:sk-|hf_|gsk_|r8_|xai-|nvapi-|tvly-|pplx-|npm_|pypi-|dop_v1_|glpat-|lin_api_|figd_|ATATT
            |hv[sbr]\.|dp\.[a-z]{2,5}\.)[\w-]{17,})
      | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16}(?![A-Za-z0-9])
      | AIza[\w-]{35}(?![\w-]) | ya29\.[\w.-]{16,} | GOCSPX-[\w-]{20,}
      | xox[abeoprs]-[A-Za-z0-9-]{10,} | xapp-[A-Za-z0-9-]{15,}
      | [rs]k_(?:live|test)_[A-Za-z0-9]{10,} | whsec_[A-Za-z0-9]{14,} | SG\.[\w-]{16,}\.[\w-]{16,}
      | eyJ[\w-]{6,}\.eyJ[\w-]{6,}(?:\.[\w-]*)?
      | (?:dapi|(?<!-)key-|SK|shp(?:at|ca|pa|ss)_)[0-9a-f]{32}(?![A-Za-z0-9])
"""
_SHAPES = re.compile(rf"(?<![A-Za-z0-9_])(?:{_SHAPED})", re.VERBOSE | re.ASCII)
# Escaped line ends are those of JSON inside of text.
_PRIVATE_KEY = re.compile(
    r"""-----BEGIN\ [A-Z0-9 ]{0,40}PRIVATE\ KEY(?:\ BLOCK)?-----
        (?:(?:\s|\\+[nr])*+[A-Za-z-]{1,40}:\ [^\n\\]{0,200})*+
        (?:\s|\\+[nr])*+[A-Za-z0-9+/=]{16}(?:[A-Za-z0-9+/=\s]|\\+[nr])*+
        (?:-----END\ [A-Z0-9 ]{0,40}PRIVATE\ KEY(?:\ BLOCK)?-----)?""",
    re.VERBOSE,
)
_URL_PASSWORD = re.compile(r"://(?P<user>[^\s/@:\"'<>\\]{0,256}):(?P<password>[^\s/@\"'<>{}$\[\]\\]{1,512})@")
_ANY_URL_PASSWORD = re.compile(
    r"""://(?P<user>[^\s/:@"'<>\\]{0,256}):(?P<password>[^\s"'<>\\]{1,256})@(?=[\w.\[%$\{-])"""
)
_WEBHOOK = re.compile(r"hooks\.slack\.com/services/([A-Za-z0-9/]{20,})")
_SIGNED_URL = re.compile(r"(?:[?&;]|u0026)(?:sig|X-(?:Amz|Goog)-Signature)=([A-Za-z0-9%+/_-]{20,}=*)")
_BEARER = re.compile(r"earer ([A-Za-z0-9._~+/-]{16,}=*)")
_COOKIES = re.compile(r"""(?i)cookie\\*["']?[ \t]{0,3}[:,][ \t]{0,3}b?(?:\\*["'])?([^\r\n"'\\]{1,4096})""")
_COOKIE = re.compile(r"(?<![^\s;:\"'])(?!(?i:path|domain|expires|max-age|samesite)=)[^\s=;,]{1,128}=([^\s=;,]{8,}+=*)")
_NAME_WORDS = (b"key", b"token", b"secret", b"pass", b"credential", b"auth", b"pwd", b"_pat")
_FOLLOWS = frozenset({*(bytes([byte]) for byte in b" \t\r\n\"'\\=:,_>]s0123456789wpo")})
"""What may stand behind a word of a name; nearly all of a program's text is left at once."""
_SUFFIX = r"s?(?:_?[0-9]{1,3}|_(?:old|new|prod|production|staging|dev|test|live|backup|primary|secondary|default|b64))?"
_WORDS = "key|token|secret|password|passwd|passphrase|pass|pwd|_pat|credentials?|authorization|auth"
_ANY_NAME = re.compile(rf"(?i){_WORDS}|cookie")
_ASSIGNED = re.compile(
    rf"""(?P<word>{_WORDS})
        (?P<suffix>(?>(?<=private_key)_id|{_SUFFIX}))
        (?: (?P<tag>>)
          | (?P<end>\\*["'])?\]?(?P<before>[ \t]{{0,3}})
            (?P<sign>=>|:=|=|:|,?(?:\s|\\n){{1,20}}\\*["']?value\\*["']?:|,)(?P<after>[ \t]{{0,3}})
          | (?P<space>[ \t]{{1,3}}) )
        (?:[bru]?(?P<quote>\\*["']))?(?P<scheme>(?:bearer|basic|token|apikey)[ ]+)?""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_LONGEST_NAME, _LONGEST_VALUE, _LONGEST_LINE = 64, 256, 160
# Only what is taken for a secret is followed to its end, or many values in a row would take quadratic time.
_PART = re.compile(r"""[^\s"'`\\,;&<>(){}\[\]$|=:]{4,160}+[^\s"'`\\,;&<>(){}\[\]$|]{0,160}+""")
_LIST = re.compile(r"""[^\s"'`\\;&<>(){}\[\]$|]{4,320}+""")
_REST = re.compile(r"""[^\s"'`\\,;&<>(){}\[\]$|]*+""")
_WORD = re.compile(r"""[^\s"'`\\]{4,160}""")
_FIELD = re.compile(r"""[^\s;"'\\]{4,256}""")
_IN_TAG = re.compile(r"[^<>\n]{4,160}(?=</)")
_LINE_ENDS = re.compile(r"""[ \t]*(?:\\*[rn]|[\r\n]|\Z)""")
_SET = r"(?:ENV|setenv|set -[A-Za-z0-9_]+|aws configure set)"
_SETS = re.compile(rf"""(?:\A|[\s"';&]|\\[nrt])(?:{_SET}[ \t]+[\w.]+|requirepass)$""")
_LINE_START = re.compile(
    r"""(?:\A|[\r\n]|\\[rn]|(?<!\w)["'])[ \t]*(?P<lead>-[ \t]|//[\w.:/-]+/:
        |(?:export|ENV|set|declare\ -x|-e)[ \t]+)?\Z""",
    re.VERBOSE,
)
_LOGIN_PAIR = re.compile(
    r"""auth ?= ?[\w.]{0,40}\(\s?[bru]?\\*(["'])([^"'\n\\]{1,128})\\*\1,\s{0,3}[bru]?\\*(["'])"""
    r"""(?P<password>[^\n]{7,128}?)(?<!\\)\\*\3"""
)
_ACCOUNT = re.compile(r"(?i)(?:uid|user id|username|user)=[^;\n]{1,128};(?:[^;\n]{1,128};)*\Z")
_OF_SERVERS = re.compile(r"(?i)\A(?:(?:ansible_[a-z_]*|become_|ssh_|sudo_|winrm_)(?:pass|password)|requirepass)\Z")
_HEADER = re.compile(r"(?i)(?:x-(?:[a-z]+-)*(?:key|token|secret)|api-key)\Z")
_CREDENTIAL_KEY = re.compile(
    r"(?i)(?:api|secret|access|private|auth|account|subscription|sign(?:ing)?|encrypt(?:ion)?|master|deploy|license)"
    r"[_.-]?key\Z"
)
_OTHER_TOKEN = re.compile(
    r"(?i)(?:next|page|pagination|continuation|purchase|start|end|eos|bos|pad|sep|unk|mask|cls|stop|sync|resume|cancel"
    r"|cancellation|client|idempotency|request|csrf)[_-]?token\Z"
)
_OTHER_NAME = re.compile(r"(?i)(?:[a-z](?:pass|auth|pwd)|first_pass|last_pass)\Z")
_PASSWORD = re.compile(r"(?i)(?:secret|password|passwd|passphrase)\Z")
_PASSWORD_NAME = re.compile(r"(?i)(?:\A|[_-])(?:password|passwd|passphrase|pwd)\Z|PASSWORD\Z")
_VARIABLE = re.compile(r"_?[A-Z][A-Z0-9_]*\Z")
_SECRET_VARIABLE = re.compile(
    rf"(?i)(?:key|token|secret|passw(?:or)?d|passphrase|credential|(?:\A|_)pass|_pwd|_pat)(?P<suffix>{_SUFFIX})\Z"
)

_LETTER, _DIGIT, _UPPER, _LOWER = re.compile("[A-Za-z]"), re.compile(r"\d"), re.compile("[A-Z]"), re.compile("[a-z]")
_NO_WORD, _UNBROKEN = re.compile("[A-Z0-9]"), re.compile(r"(?=[A-Za-z]*\d)[A-Za-z0-9]{16}")
_DOTTED = re.compile(r"\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+\Z")
_PATH = re.compile(r"(?:~|\.{0,2})/[\w.-]+(?:/[\w.-]+)*/?\Z")
_CAMEL = re.compile(r"(?:[A-Z]{0,3}\d?[A-Z]?[a-z]{3,}\d{0,2}){3,}\Z")  # the name of a class
_SIGN, _SIGNS = re.compile(r"[!@#$%^&*?~+]"), frozenset("!@#%^&*?~+;<>|")
_PLACEHOLDER = re.compile(
    r"(?i)(?:your|insert|replace|redacted|changeme|placeholder|(?:dummy|fake|mock)[-_]|0x(?![0-9a-f]{32})|%(?:[({]|[sdr]\b|[a-z_]*%\Z))|(?:x{3,}|\*+|\.{3,}|none|null|true|false|undefined"
    r"|required|optional|string|pass|passwd|pwd|password|secret|token|key)\Z"
)
# Expressions, patterns, options and references to values that stand elsewhere.
_CODE = re.compile(
    r"""\A(?:--?[a-z]+|\$[A-Za-z_]+\Z|\$[A-Z_]+\b|\^.*\$\Z|<[^<>]*>|<\||\[[\w ]*\]|%\w+%\Z
        |[A-Za-z_](?:[\w.]*\w)?(?:[(\[](?!\])[\w.,:=*()\[\]-]*\Z|(?:==|!=|<=|>=)))
    |://|</|/>|%[sdr]\b|%\(\w+\)|\{[\w.!: -]*\}|\$(?:\{|\(\w)|\\[dswb]
    |\(\?[:P=!]|\[(?:\^|a-z|A-Z|0-9|redacted\])|\w\(\)""",
    re.VERBOSE,
)
# Passwords of documentations and of servers as they are delivered.
_DUMMY = re.compile(
    r"(?i)(?:tiger|pass(?:wd|word|phrase|code)?|pwd?|secrets?|tests?|testing|(?:test|fake|dummy|mock)(?:pass|password|secret|key|token|user)"
    r"|admin|root|postgres|mysql|mongo(?:db)?|redis|guest|user(?:name)?|bar|baz|foo(?:bar)?|qux|spam|eggs|example|sample"
    r"|change[_-]?(?:me|it)|letmein|qwerty|abc(?:123|def)?|123(?:4(?:5(?:6(?:7(?:89?0?)?)?)?)?)?|docker|minio(?:admin)?"
    r"|rabbitmq|airflow|dummy|fake|my[_-]?(?:secret[_-]?)?(?:pass|password|pw|secret|token|key)|token|key|api_?key|me"
    r"|p@?ss|p@ssw(?:or|0r)d\d?|pass(?:word)?[_-]?1?2?3?4?|hello|world|demo|default|none|null|\w{1,2}|x+|y+|z+|\W+)\Z"
)


def _both_kinds(sign: str) -> str:
    """Some of ``sign``, with a letter and a digit, or a sign that passwords have; or a long number."""
    other = "[0-9!@#$%^&*?~+]"
    return rf"(?:{sign}*[A-Za-z]{sign}*{other}|{sign}*{other}{sign}*[A-Za-z]|{sign}*[0-9]{{16}})"


_SHAPE_HINT = rf"(?:^|[^A-Za-z0-9_])(?x-u:{re.sub(r'[(][?]<?!.*?[)]', '', _SHAPED)})"


def _hints() -> str:
    """What every text with a secret has, for an engine that looks for all of it at once but knows no look-around."""
    end, sign = r"""(?:\\*["'])?\]?[ \t]{0,3}""", r"""(?:=>|:=|=|:|,?(?:[\s?]|\\n){1,20}\\*["']?(?i:value)\\*["']?:)"""
    word, behind, scheme = f"(?i:{_WORDS})", f"(?i:_id|{_SUFFIX})", "(?:(?i:bearer|basic|token|apikey) +)?"
    # An escaped quote ends where the same one stands.
    quotes = [(quote, rf"[^{quote}]|\\{quote}") for quote in "\"'"]
    quotes += [(rf"\\+{quote}", rf"[^{quote}]|[^\\]{quote}|\\\\+{quote}") for quote in "\"'"]
    quoted = "|".join(rf"[bru]?{quote}{scheme}{_both_kinds(f'(?:{inside})')}" for quote, inside in quotes)
    value = rf"""(?:{quoted}|{scheme}{_both_kinds(r'''[^\s"'`\\]''')})"""
    hints = (
        rf"{word}{behind}{end}{sign}[ \t]{{0,3}}{value}",
        rf"{word}{behind}{end},[ \t]{{0,3}}(?:{quoted})",
        rf"{word}{behind}>[^<>\n]+</",
        rf"(?:(?:--|{_SET}[ \t])[a-zA-Z0-9_. \t-]*{word}{behind}|requirepass)[ \t]{{1,3}}{value}",
        rf"(?:{_WORDS.upper()}){behind}(?:{end}{sign}[ \t]{{0,3}}(?:\S{{4}}|[bru]?\\*[\"'])|[ \t]+[bru]?\\*[\"'])",
        rf";[a-zA-Z0-9_.-]*(?i:pass|pwd)[a-z]*{behind}{end}=",
        rf"(?i:x-[a-z-]*(?:key|token|secret)|api-key){behind}{end}{sign}",
        r"(?i:authorization)(?s:.){0,80}?(?i:bearer|basic|token|apikey) ",
        r"""(?i:cookie)\\*["']?[ \t]{0,3}[:,]""",
        r"PRIVATE KEY",
        r"""://[^\s/:@"'<>\\]{0,256}:[^\s"'<>\\]+@""",
        r"hooks\.slack\.com/services/",
        r"(?:sig|Signature)=[A-Za-z0-9%+/_-]{20}",
        r"earer [A-Za-z0-9._~+/-]{16}",
        r"auth ?= ?[^\s(]{0,40}\(",
        _SHAPE_HINT,
    )
    return "|".join(hints)


# This engine reads a text of a thousand tokens in five microseconds; nearly all of them end here.
_may_hold_one = SchemaValidator(core_schema.str_schema(pattern=_hints())).isinstance_python
_may_have_shape = SchemaValidator(core_schema.str_schema(pattern=_SHAPE_HINT)).isinstance_python


def find_secrets(text: str, own: Sequence[str] = ()) -> list[Span]:
    """Where secrets stand in ``text``, in order; the spans may overlap. ``own`` are texts that are secrets anyway."""
    # One byte a character, so that a place is the same number in both.
    plain = text.encode("ascii", "replace")
    found = {match.span() for secret in own if secret in text for match in re.finditer(re.escape(secret), text)}
    if _may_hold_one(plain):
        found |= {*(_with_known_shape(text) if _may_have_shape(plain) else ()), *_marked(text)}
        found.update(_named(text, plain.lower()))
    return sorted(found)


def is_secret_item(name: str, value: str) -> bool:
    """Whether ``value``, as the item ``name`` of a JSON object, is a secret."""
    if not _ANY_NAME.search(name):
        return False
    if _PASSWORD_NAME.search(name) and len(value) >= 4:
        return not _PLACEHOLDER.match(value) and value[0] not in "$<{[%"
    item = f'"{name}": "{value}"'
    return any(start >= len(name) + 5 for start, _ in _named(item, item.encode("ascii", "replace").lower()))


def own_secrets(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The values of variables whose names say that they are secret, also as JSON writes them.

    Left out are paths, values that are too short, and single words, which everybody's text may hold. Of a list its
    parts are secrets, too; a plain number of tokens is none.
    """
    values: set[str] = set()
    for name in environ:
        if match := _secret_variable(name):
            several = match["suffix"][:1].lower() == "s"
            parts = re.split(r"[,;\s]+", environ[name]) if several else [environ[name]]
            values.update(part for part in parts if not several or _is_generated(part, SHORTEST_OWN))
    short = {value for value in values if len(value) < SHORTEST_OWN or _PLACEHOLDER.match(value)}
    words = {value for value in values if len(value) <= _LONGEST_OWN_WORD and value.isalpha()}
    found = values - short - words - {value for value in values if _PATH.match(value) and not _is_random(value)}
    return tuple(found | {value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for value in found})


_secret_variable = lru_cache(maxsize=4096)(_SECRET_VARIABLE.search)


def _with_known_shape(text: str) -> Iterator[Span]:
    for match in _SHAPES.finditer(text):
        if _has_random_part(match["prefixed"]) if match["prefixed"] else _NO_WORD.search(match[0]):
            yield match.span()


def _marked(text: str) -> Iterator[Span]:
    """Secrets that something around them gives away."""
    yield from (match.span() for match in _PRIVATE_KEY.finditer(text))
    yield from (match.span(1) for match in _WEBHOOK.finditer(text))
    yield from (match.span(1) for match in _SIGNED_URL.finditer(text) if _has_random_part(match[1]))
    for pattern in (_URL_PASSWORD, _ANY_URL_PASSWORD):
        for match in pattern.finditer(text):
            password = match["password"]
            known = _is_dummy(password) or password == match["user"]
            if not known and (pattern is _URL_PASSWORD or _is_strong(password, 8)):
                yield match.span("password")
    for match in _LOGIN_PAIR.finditer(text):
        if match["password"] != match[2] and _is_strong(match["password"], 7):
            yield match.span("password")
    for match in _BEARER.finditer(text):
        if _is_generated(match[1], 16) and not _is_dummy(match[1]):
            yield match.span(1)


def _named(text: str, lower: bytes) -> Iterator[Span]:
    """Secrets that a name gives away."""
    for word in _NAME_WORDS:
        at = lower.find(word)
        while at >= 0:
            behind = at + len(word)
            if lower[behind : behind + 1] in _FOLLOWS and (match := _ASSIGNED.match(text, at)):
                span = _quoted(text, match) if match["quote"] else _unquoted(text, match)
                if span:
                    yield span
                    behind = max(behind, span[1])
            at = lower.find(word, behind)
    if b"cookie" in lower:
        for header in _COOKIES.finditer(text):
            for match in _COOKIE.finditer(text, *header.span(1)):
                if _is_generated(match[1], 8):
                    yield match.span(1)


def _quoted(text: str, match: re.Match[str]) -> Span | None:
    """The secret between quotes."""
    word, sign, name = match["word"].lower(), match["sign"], _name_before(text, match.start()) + match["word"]
    span = _to_quote(text, match.end(), match["quote"])
    if span is None:
        return None
    value = text[slice(*span)]
    if _is_dummy(value) or _is_code(value):
        return None
    if " " in value:  # a password of several words
        of_variable = _VARIABLE.match(name) and not match["before"] and _is_strong(value.replace(" ", ""), 8)
        return span if of_variable and _PASSWORD.search(name) else None
    if sign == ",":  # a pair of texts, or only two of a list
        pair = match["end"] and not match["suffix"] and (match["scheme"] or _is_generated(value, 8))
        return span if pair else None
    if match["scheme"] and word == "authorization":
        return span if len(value) >= 6 and not _DOTTED.match(value) else None
    if word in ("auth", "_pat"):
        return span if _is_random(value) and _NAME.fullmatch(value.rstrip("=")) else None
    before = text[max(0, match.start() - _LONGEST_LINE) : match.end("word")]
    if match["space"] and not name.startswith("--") and not _SETS.search(before):
        return None  # a person says ``pass "it" as an argument``
    if _VARIABLE.match(name) and not match["before"] and _is_value_of_variable(name, value):
        return span
    return (
        span
        if _is_strong(value.replace("\\", ""), 8 if match["space"] else 7) and _is_credential(name, match)
        else None
    )


def _to_quote(text: str, start: int, quote: str) -> Span | None:
    """From ``start`` to the closing quote; a quote behind one more backslash is a part of the value."""
    at, stop = start, min(len(text), start + _LONGEST_VALUE)
    while (end := text.find(quote, at, stop)) >= 0:
        if end > start and text[end - 1] == "\\":
            at = end + len(quote)
            continue
        return (start, end) if end >= start + 4 else None
    return None


def _unquoted(text: str, match: re.Match[str]) -> Span | None:
    """The secret without quotes: the text of a tag, the rest of a line, a field, or a word between other text."""
    word, sign, name = match["word"].lower(), match["sign"], _name_before(text, match.start()) + match["word"]
    if match["tag"]:
        found = _IN_TAG.match(text, match.end())
        return found.span() if found and _is_strong(found[0], 6) and _is_credential(name, match) else None
    start = match.start() + len(match["word"]) - len(name)
    before = text[max(0, start - _LONGEST_LINE) : start]
    if sign == "=" and word[0] == "p" and before[-1:] == ";" and _ACCOUNT.search(before):
        found = _FIELD.match(text, match.end())
        return found.span() if found and not _is_code(found[0]) and not _is_dummy(found[0]) else None
    return (not match["scheme"] and _whole(text, match, name, before)) or _part(text, match, name)


def _whole(text: str, match: re.Match[str], name: str, before: str) -> Span | None:
    """A value up to the next white space or quote, where only a secret can stand."""
    run, sign, variable = _WORD.match(text, match.end()), match["sign"], _VARIABLE.match(name)
    if run is None or match["end"] or sign == ",":
        return None
    value, end, lead = run[0], run.end(), _LINE_START.search(before)
    if not _is_strong(value, 6 if sign == "=" else 8) or not _is_credential(name, match):
        return None
    if match["space"]:
        found = _SETS.search(before + name)
    elif sign == ":" and text[end : end + 8].lstrip("\\")[:1] in ('"', "'"):
        found = "-" in name or (before[-1:] in ('"', "'") and match["word"].lower() != "auth")
    elif lead and (_LINE_ENDS.match(text, end) or (sign == "=" and (lead["lead"] or variable))):
        # A program has such lines too, with the name of something else as the value.
        code = (value[-1] in ",([{" and not _is_noise(value)) or ("_" in value and value.isidentifier())
        found = variable or name.lower().endswith("_auth") or _is_random(value) or not code
    else:
        found = sign == "=" and _OF_SERVERS.match(name)
    return run.span() if found else None


def _part(text: str, match: re.Match[str], name: str) -> Span | None:
    """A value that looks generated, up to the next sign."""
    word, sign, suffix = match["word"].lower(), match["sign"], match["suffix"].lower()
    run = (_LIST if suffix[:1] == "s" else _PART).match(text, match.end())
    if run is None or sign == "," or (match["end"] and not match["scheme"]):
        return None
    value, follows, name = run[0], text[run.end() : run.end() + 1], name.rpartition(".")[2]
    if _is_dummy(value) or follows in ("(", "[", "{"):
        return None
    if (match["scheme"] and word == "authorization") or (sign and _HEADER.match(name)):
        found = len(value) >= 6 and not _DOTTED.match(value)
    elif not sign:  # an option
        option = name.startswith("--") and value[0] != "-" and _is_credential(name, match)
        found = option and _is_generated(value, 6 if _PASSWORD.search(name) else 8)
    else:
        tight = not match["before"] and not (match["after"] and sign == "=")
        ends = follows in ("", "\n", "\r", "\\")
        variable = _VARIABLE.match(name) and tight and (sign == "=" or ends) and suffix[:1] != "s"
        short = bool(suffix) or word in ("pass", "pwd", "auth", "_pat")
        loose = not short and (tight and "_" not in value if sign == "=" else ends) and _is_generated(value, 7)
        found = (loose or ((short or sign == "=") and _is_random(value))) and _is_credential(name, match)
        found = found or (variable and _is_value_of_variable(name, value))
    rest = _REST.match(text, run.end()) if found else None
    return (run.start(), rest.end()) if rest else None


def _is_value_of_variable(name: str, value: str) -> bool:
    """In ``NAME=value`` of an environment dump; keys and tokens may be of other kinds (``EOS_TOKEN``, ``SORT_KEY``)."""
    if (_PATH.match(value) and not _is_random(value)) or _OTHER_NAME.search(name) or name in ("PWD", "PASS"):
        return False
    if _PASSWORD.search(name):
        return True
    credential = _CREDENTIAL_KEY.search(name) or not name.endswith("KEY")
    return _is_generated(value, 8) or (bool(credential) and len(value) >= 12 and not value.isdigit())


def _is_credential(name: str, match: re.Match[str]) -> bool:
    """Whether a secret may be called so; ``key`` and ``token`` alone are too many other things."""
    word = match["word"].lower()
    if _OF_SERVERS.match(name):
        return True
    if match["suffix"][:1].lower() == "s" and not _VARIABLE.match(name):
        return False
    if word == "key":
        return _CREDENTIAL_KEY.search(name) is not None
    if word == "token":
        return _OTHER_TOKEN.search(name) is None
    return word != "authorization" and (word not in ("pass", "pwd", "auth") or _OTHER_NAME.search(name) is None)


def _name_before(text: str, end: int) -> str:
    """What of a name, dots included, stands before ``end``; the ``n`` of an escaped line end is no part of it."""
    start = max(0, end - _LONGEST_NAME)
    found = _NAME.match(text[start:end][::-1])
    name = found[0][::-1] if found else ""
    at = end - len(name)
    return name[1:] if name[:1] in ("n", "r", "t") and text[at - 1 : at] == "\\" and at > 0 else name


def _is_generated(value: str, at_least: int) -> bool:
    """Letters and digits, and neither a path nor a name in a program."""
    if len(value) < at_least or not _LETTER.search(value) or not _DIGIT.search(value):
        return False
    named = _DOTTED.match(value) or _CAMEL.match(value) or (_PATH.match(value) and not _is_random(value))
    return not named


def _is_random(value: str) -> bool:
    """As ``_is_generated``, but unlike any name of a variable or a file."""
    return _has_random_part(value) and len(value) >= 16 and not _DOTTED.match(value)


def _has_random_part(value: str) -> bool:
    return bool(_DIGIT.search(value)) and bool(_UPPER.search(value) or _UNBROKEN.search(value))


def _is_dummy(value: str) -> bool:
    """Whether everybody knows ``value``, or it only stands for a secret."""
    known = _PLACEHOLDER.match(value) or _DUMMY.match(value) or "EXAMPLE" in value
    return bool(known) and not _is_noise(value)


def _is_code(value: str) -> bool:
    """Whether a value is a part of a program, or refers to a value that stands elsewhere."""
    if value.isalnum():
        return False
    return value.startswith("<|") or (_CODE.search(value[:96]) is not None and not _is_noise(value))


def _is_noise(value: str) -> bool:
    """Whether there are more kinds of signs among digits and letters than in any expression of that length."""
    return 12 <= len(value) <= 80 and len(set(value) & _SIGNS) >= 3 and "redacted" not in value


def _is_strong(value: str, at_least: int) -> bool:
    """Whether a whole value, signs included, is a secret: for places where only a secret can stand.

    Letters and digits; or both cases of letters and one of the signs that passwords have. No expression of a program.
    """
    if len(value) < at_least or not _LETTER.search(value):
        return False
    if not _DIGIT.search(value) and not (_SIGN.search(value) and _UPPER.search(value) and _LOWER.search(value)):
        return False
    if _is_dummy(value) or _DOTTED.match(value) or _CAMEL.match(value) or _is_code(value):
        return False
    return _is_random(value) or not _PATH.match(value)
