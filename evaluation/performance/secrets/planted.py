"""Secrets to plant: 20 forms of values, and 33 places where values stand.

A place writes a value as its syntax asks (a URL with percent signs, JSON with escapes), and says which it can hold.
"""

from __future__ import annotations

import base64
import json
import random
import string
import uuid
from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import quote

_LETTERS, _DIGITS, _HEX = string.ascii_letters, string.digits, "0123456789abcdef"
_WORDS = ("correct", "horse", "battery", "staple", "orange", "river", "winter", "tiger", "copper", "violet", "maple")

Form = Callable[[random.Random], str]


def _of(letters: str, length: int, *longer: int) -> Form:
    def make(chance: random.Random) -> str:
        return "".join(chance.choices(letters, k=chance.choice((length, *longer))))

    return make


def _mixed(letters: str, *lengths: int) -> Form:
    """As password managers do: at least a small letter, a capital, a digit and, if there are any, a sign."""
    groups = [string.ascii_lowercase, string.ascii_uppercase, _DIGITS]
    groups += [signs] if (signs := "".join(sorted(set(letters) - set(_LETTERS + _DIGITS)))) else []

    def make(chance: random.Random) -> str:
        found = [chance.choice(group) for group in groups]
        found += chance.choices(letters, k=chance.choice(lengths) - len(found))
        chance.shuffle(found)
        return "".join(found)

    return make


def _words(chance: random.Random) -> str:
    return "-".join(chance.sample(_WORDS, 3)) + str(chance.randrange(10, 9999)) + chance.choice("!#*?")


def _word_with_digits(chance: random.Random) -> str:
    return chance.choice(_WORDS).capitalize() + chance.choice("!@#$%^&*_") + str(chance.randrange(100, 99999))


def _base64_of(count: int, *, safe: bool = False) -> Form:
    def make(chance: random.Random) -> str:
        encode = base64.urlsafe_b64encode if safe else base64.b64encode
        return encode(chance.randbytes(count)).decode().rstrip("=" if safe else "")

    return make


def _login(chance: random.Random) -> str:
    return base64.b64encode(f"deploy:{_mixed(_LETTERS + _DIGITS, 14)(chance)}".encode()).decode()


def _jwt(chance: random.Random) -> str:
    parts = (b'{"alg":"HS256"}', json.dumps({"sub": chance.randrange(10**9)}).encode(), chance.randbytes(32))
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


_DJANGO = "abcdefghijklmnopqrstuvwxyz0123456789!@#$%^&*(-_=+)"

FORMS: dict[str, Form] = {
    "password 12, !@#$%^&*": _mixed(_LETTERS + _DIGITS + "!@#$%^&*", 10, 12, 14),
    "password 16, !@#$%^&*": _mixed(_LETTERS + _DIGITS + "!@#$%^&*", 16, 20),
    "password 20, all signs": _mixed(_LETTERS + _DIGITS + "!#$%&()*+,-./:;<=>?@[]^_{|}~", 18, 20, 24),
    "password, signs at the end": lambda chance: (
        _mixed(_LETTERS + _DIGITS, 9, 11)(chance) + chance.choice(("!", "!!", "#1", "$", "%"))
    ),
    "password 12, letters and digits": _mixed(_LETTERS + _DIGITS, 10, 12),
    "password 24, letters and digits": _mixed(_LETTERS + _DIGITS, 24, 32),
    "word with digits": _word_with_digits,
    "words with digits": _words,
    "Django key": _of(_DJANGO, 50),
    "Django insecure key": lambda chance: "django-insecure-" + _of(_DJANGO, 50)(chance),
    "hex 32": _of(_HEX, 32),
    "hex 64": _of(_HEX, 64, 40),
    "0x key": lambda chance: "0x" + _of(_HEX, 64)(chance),
    "UUID": lambda chance: str(uuid.UUID(int=chance.getrandbits(128), version=4)),
    "AWS secret": _of(_LETTERS + _DIGITS + "/+", 40),
    "base64 32 bytes": _base64_of(32),
    "base64url 32 bytes": _base64_of(32, safe=True),
    "login in base64": _login,
    "GitHub token": lambda chance: "ghp_" + _of(_LETTERS + _DIGITS, 36)(chance),
    "JWT": _jwt,
}
"""What a secret looks like: name -> a maker of values."""

_NOT_IN_A_WORD = set(" \t\"'`\\<>|;&()$#{}")


def _any(value: str) -> bool:
    return True


def _shell_word(value: str) -> bool:
    return not set(value) & _NOT_IN_A_WORD and value[0] not in "~!-%@*[" and "!" not in value and "*" not in value


def _line(value: str) -> bool:
    """To the end of the line, as in .env and .ini files."""
    return value[0] not in "#;\"'[{" and " #" not in value


def _plain_yaml(value: str) -> bool:
    return value[0] not in "!&*-?{}[],#|>@`\"'%" and ": " not in value and not value.endswith(":")


def _without(*signs: str) -> Callable[[str], bool]:
    return lambda value: not any(sign in value for sign in signs)


def _header(value: str) -> bool:
    return '"' not in value and "\\" not in value and "$" not in value and "`" not in value


def _xml(value: str) -> str:
    return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _escaped(value: str) -> str:
    return json.dumps(value)[1:-1]


def _percent(value: str) -> str:
    return quote(value, safe="!*")


def _same(value: str) -> str:
    return value


class Place(NamedTuple):
    """``text`` with ``{}`` for the value; ``write`` makes what stands there, ``holds`` says which values can."""

    text: str
    write: Callable[[str], str] = _same
    holds: Callable[[str], bool] = _any


PLACES: dict[str, Place] = {
    "Python assignment": Place('import os\npassword = "{}"\nconnect(password)\n', _escaped),
    "Django settings": Place("DEBUG = True\nSECRET_KEY = '{}'\nALLOWED_HOSTS = []\n", holds=_without("'")),
    "Python call": Place('client = Client(user="deploy", api_key="{}", timeout=3)\n', _escaped),
    "Python dict": Place("DB = {{'default': {{'USER': 'app', 'PASSWORD': '{}', 'HOST': 'db'}}}}\n"),
    "os.environ": Place("os.environ['SERVICE_TOKEN'] = '{}'\n"),
    "auth pair": Place("requests.get(url, auth=('deploy', '{}'), timeout=3)\n"),
    ".env": Place("HOST=db\nDB_PASSWORD={}\nPORT=5432\n", holds=_line),
    "export in quotes": Place("export API_TOKEN='{}'\nmake deploy\n"),
    "export": Place("export ACCESS_TOKEN={}\nmake deploy\n", holds=_shell_word),
    "Dockerfile ENV": Place("FROM python:3.12\nENV API_KEY {}\nRUN make\n", holds=_line),
    "YAML": Place("db:\n  user: app\n  password: {}\n  port: 5432\n", holds=_plain_yaml),
    "YAML in quotes": Place('db:\n  client_secret: "{}"\n  port: 5432\n', _escaped),
    "JSON": Place('{{"user": "app", "password": "{}", "port": 5432}}', _escaped),
    "JSON in JSON": Place('{{"content": "{{\\"apiKey\\": \\"{}\\", \\"a\\": 1}}"}}', lambda v: _escaped(_escaped(v))),
    "properties": Place("spring.datasource.username=app\nspring.datasource.password={}\napp.name=x\n", holds=_line),
    "api.key": Place("service.url=https://x.example.com\napi.key={}\napp.name=x\n", holds=_line),
    "XML": Place("<server>\n  <username>app</username>\n  <password>{}</password>\n</server>", _xml),
    "database URL": Place("DATABASE_URL=postgresql://app:{}@db.example.com:5432/shop\n", _percent),
    "database URL, raw": Place("mysql+pymysql://app:{}@db.example.com/shop?ssl=true\n", holds=_without(*"/\"' <>")),
    "curl -H": Place('curl -s -H "DD-API-KEY: {}" https://api.example.com/v1/series\n', holds=_header),
    "PRIVATE-TOKEN": Place('curl --header "PRIVATE-TOKEN: {}" https://git.example.com/api/v4\n', holds=_header),
    "apikey header": Place("curl -H 'apikey: {}' https://x.example.com/rest/v1/todos\n", holds=_without("'")),
    "aws configure": Place("aws configure set aws_secret_access_key {}\naws s3 ls\n", holds=_shell_word),
    "ansible": Place("web1 ansible_host=10.0.0.5 ansible_ssh_pass={} ansible_port=22\n", holds=_shell_word),
    "connection string": Place("Server=db;Database=shop;UID=sa;PWD={};Encrypt=yes", holds=_without(*";'\"{}")),
    ".npmrc": Place("registry=https://npm.example.com/\n//npm.example.com/:_auth={}\nalways-auth=true\n", holds=_line),
    "private key": Place("RPC=https://rpc.example.com\nPRIVATE_KEY={}\nCHAIN=1\n", holds=_line),
    "fish": Place("set -gx PATH /usr/bin\nset -x ACCESS_TOKEN {}\nmake deploy\n", holds=_shell_word),
    "fish in quotes": Place("set -gx DB_PASSWORD '{}'\nmake deploy\n", holds=_without("'")),
    "sshpass": Place("sshpass -p '{}' ssh app@db.example.com uptime\n", holds=_without(*"'\"$<>{}")),
    "Redis": Place("port 6379\nrequirepass {}\nmaxmemory 1gb\n", holds=_shell_word),
    "service account": Place('{{"type": "service_account", "private_key_id": "{}", "client_id": "1"}}', _escaped),
    "option in quotes": Place("tool login --user app --password '{}' --verbose\n"),
}  # fmt: skip
"""Where a secret stands: name -> the place."""


class Planted(NamedTuple):
    """``secret`` (as it is written) in ``text``."""

    form: str
    place: str
    text: str
    secret: str


def planted(seed: int, values: int) -> Iterator[Planted]:
    """``values`` of every form in every place that can hold them."""
    for form, make in FORMS.items():
        chance = random.Random(f"{seed}/{form}")
        for _ in range(values):
            value = make(chance)
            for name, place in PLACES.items():
                if place.holds(value):
                    written = place.write(value)
                    yield Planted(form, name, place.text.format(written), written)


def left_of(secret: str, clean: str) -> bool:
    """Whether eight characters of the secret in a row, or all of a shorter one, are still there."""
    length = min(8, len(secret))
    return any(secret[at : at + length] in clean for at in range(len(secret) - length + 1))
