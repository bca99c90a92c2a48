"""Texts as they come out of headers, environments and tools, with secrets planted in them.

The secrets are put together here, so that no scanner of repositories takes them for real ones.
"""

from __future__ import annotations

import base64
import json

_MIXED = "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY"
_HEX = "0123456789abcdef0123456789abcdef"
_JWT_HEAD = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').decode().rstrip("=")
_JWT_BODY = base64.urlsafe_b64encode(b'{"sub":"1234567890","name":"A. Person"}').decode().rstrip("=")
_KEY_LINES = "\n".join(_MIXED * 2 for _ in range(4))

SHAPES = {
    "openai": f"sk-{_MIXED}{_MIXED}",
    "openai project": f"sk-proj-{_MIXED}-{_MIXED}_{_MIXED}",
    "anthropic": f"sk-ant-api03-{_MIXED}-{_MIXED}AA",
    "deepseek": f"sk-{_HEX}",
    "openrouter": f"sk-or-v1-{_HEX}{_HEX}",
    "hugging face": f"hf_{_MIXED}ab",
    "github": f"ghp_{_MIXED}abcd",
    "github server": f"ghs_{_MIXED}abcd",
    "github fine-grained": f"github_pat_{_MIXED}_{_MIXED}",
    "gitlab": f"glpat-{_MIXED[:20]}",
    "aws id": "AKIA" + "Q3EGSR7VX2LM5NPT",
    "google": "AIza" + "Sy" + _MIXED + "x",
    "slack bot": f"xoxb-123456789012-1234567890123-{_MIXED[:24]}",
    "slack app": f"xapp-1-A012ABCD-{_HEX}",
    "stripe": f"sk_live_{_MIXED[:24]}",
    "stripe test": f"rk_test_{_MIXED[:24]}",
    "sendgrid": f"SG.{_MIXED[:22]}.{_MIXED}",
    "groq": f"gsk_{_MIXED}{_MIXED}",
    "jwt": f"{_JWT_HEAD}.{_JWT_BODY}.{_MIXED}",
}
"""What a known kind of key looks like."""

PRIVATE_KEY = f"-----BEGIN RSA PRIVATE KEY-----\n{_KEY_LINES}\n-----END RSA PRIVATE KEY-----"

_AWS_SECRET = "wJalrXUtnFEMI/K7MDENG+" + "bPxRfiCYzzKEYzzKEY"

IN_TEXT: list[tuple[str, str]] = [
    (f"Authorization: Bearer {_MIXED}", _MIXED),
    ("POST /v1 HTTP/1.1\r\nauthorization: Basic dXNlcjpodW50ZXIyMg==\r\nAccept: */*", "dXNlcjpodW50ZXIyMg=="),
    (f"{{'Authorization': 'Bearer {_MIXED}', 'accept': '*/*'}}", _MIXED),
    (f"[(b'host', b'x'), (b'authorization', b'Bearer {_MIXED}')]", _MIXED),
    (f"> x-api-key: {_HEX}\n> content-type: application/json", _HEX),
    (f'{{"x-api-key": "{_HEX}", "anthropic-version": "2023-06-01"}}', _HEX),
    (f"curl -H 'Authorization: token {_MIXED}' https://example.com", _MIXED),
    (f"PATH=/usr/bin\nOPENWEATHER_API_KEY={_HEX}\nHOME=/root", _HEX),
    ("PATH=/usr/bin\nDB_PASSWORD=correcthorse\nHOME=/root", "correcthorse"),
    (f"export AWS_SECRET_ACCESS_KEY={_AWS_SECRET}", _AWS_SECRET),
    (f'declare -x SESSION_TOKEN="{_MIXED}"', _MIXED),
    ('{"Env": ["PATH=/usr/bin", "POSTGRES_PASSWORD=s3cr3t-pass", "LANG=C"]}', "s3cr3t-pass"),
    ("services:\n  db:\n    environment:\n      MYSQL_ROOT_PASSWORD: tr0ub4dor\n      TZ: UTC", "tr0ub4dor"),
    ("env:\n- name: CLIENT_SECRET\n  value: opensesame99\n", "opensesame99"),
    ('[{"name": "CLIENT_SECRET", "value": "opensesame99"}]', "opensesame99"),
    (f"aws_access_key_id = x\naws_secret_access_key = {_AWS_SECRET}\n", _AWS_SECRET),
    ('{"username": "me", "password": "hunter2"}', "hunter2"),
    ("host=db user=me password=hunter2 dbname=x", "hunter2"),
    (f"GET /search?q=a&api_key={_HEX}&page=2", _HEX),
    ("postgresql://admin:sw0rdf!sh@db:5432/shop", "sw0rdf!sh"),
    ("git remote -v\norigin https://me:correct-horse@git.example.com/x.git (fetch)", "correct-horse"),
    (f"{PRIVATE_KEY}\n", _KEY_LINES),
    (json.dumps({"command": f"cat id_rsa <<EOF\n{PRIVATE_KEY}\nEOF"}), json.dumps(_KEY_LINES)[1:-1]),
    (json.dumps({"command": f"export CI_TOKEN={_MIXED}\nmake"}), _MIXED),
    (json.dumps({"output": json.dumps({"client_secret": _MIXED})}), _MIXED),
    (f"https://hooks.slack.com/services/T0AAAAAAA/B0BBBBBBB/{_MIXED[:24]}", _MIXED[:24]),
    (f"openai.AuthenticationError: Incorrect API key provided: {SHAPES['openai']}.", SHAPES["openai"]),
    (f"log: sent 'bearer {_MIXED}'", _MIXED),
]
"""Text, and the secret in it."""

CLEAN: list[str] = [
    "commit 3f2a9c1b7e5d4f6a8b0c2d4e6f8a0b1c2d3e4f5a\nAuthor: A <a@example.com>",
    "id: 123e4567-e89b-12d3-a456-426614174000",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 8).decode(),
    'token = tokenizer.encode("hello")[0]',
    "token = tokenizer(text, max_length=512)",
    "tokens = 12345678\nmax_tokens=512, key=lambda item: item.name2",
    "def login(self, username: str, password: str) -> Session:",
    "password: Mapped[str] = mapped_column(String(255))",
    "self.client.login(username='testclient', password='password')",
    "parser.add_argument('--api-key', default=None, help='the key')",
    "api_key = os.environ['OPENAI_API_KEY']",
    'headers = {"Authorization": f"Bearer {self.api_key}"}',
    "curl -H 'Authorization: Bearer $TOKEN' https://example.com",
    "curl -H 'Authorization: Bearer YOUR_API_KEY' https://example.com",
    "export OPENAI_API_KEY=<your key>\nexport HF_TOKEN=${HF_TOKEN}",
    "OPENAI_API_KEY=your-api-key-here",
    "EOS_TOKEN=</s>\nPAD_TOKEN=0\nSORT_KEY=created_at\nMAX_TOKEN=100000",
    "SSH_KEY=/root/.ssh/id_ed25519",
    "primary_key=True, foreign_key='users.id', cache_key=md5sum12345",
    '{"token": "the", "logprob": -0.1, "bytes": [116]}',
    "git clone https://github.com/user/repo.git && psql postgresql://localhost:5432/shop",
    "see http://127.0.0.1:8000/@me and mailto:someone@example.com",
    'url = f"postgresql://{user}:{password}@{host}/{name}"',
    '"postgresql://%s:%s@%s/db" % (user, password, host)',
    '<div class="sk-top-container sk-estimator-doc-link-fitted"><div class="sk-text-repr-fallback">',
    "from huggingface_hub import hf_hub_download, hf_hub_download_with_retries_and_cache",
    "def test_my_secret_is_kept(): assert '-----BEGIN PRIVATE KEY-----' in pem",
    "The password: it must have at least 8 characters. A token: something short.",
    "secret = secrets.token_hex(32)",
    "key = keys.ed25519_generate()\nsecret_key = settings.SECRET_KEY2",
    "password = password_for_user_2\ntoken=next_token",
    'headers = {"x-api-key": literal_api_key or os.getenv("KEY")}',
    ":param token: Token dictionary, must include access_token",
    '"V1Secret": ".models.v1_secret",',
    "<Token token=0x7f3a2b1c9d00>",
    "x.authorization = authorization_backend_2.check(request)",
    "https://example.com/a/very/long/path/2024/01/file_name_with_words-and-numbers-123.html",
    "pytest tests/test_tokens.py::test_key_is_found_1234567890",
]
"""What agents read and write all day."""
