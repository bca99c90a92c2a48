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
    "github fine-grained": f"github_pat_{_MIXED}_{_MIXED}",
    "gitlab": f"glpat-{_MIXED[:20]}",
    "aws id": "AKIA" + "Q3EGSR7VX2LM5NPT",
    "google": "AIza" + "Sy" + _MIXED + "x",
    "slack bot": f"xoxb-123456789012-1234567890123-{_MIXED[:24]}",
    "slack app": f"xapp-1-A012ABCD-{_HEX}",
    "stripe": f"sk_live_{_MIXED[:24]}",
    "sendgrid": f"SG.{_MIXED[:22]}.{_MIXED}",
    "groq": f"gsk_{_MIXED}{_MIXED}",
    "databricks": f"dapi{_HEX}",
    "vault": f"hvs.{_MIXED}{_MIXED}",
    "atlassian": f"ATATT3xFfGF0{_MIXED}{_MIXED}",
    "twilio": f"SK{_HEX}",
    "jwt": f"{_JWT_HEAD}.{_JWT_BODY}.{_MIXED}",
}
"""What a known kind of key looks like."""

PRIVATE_KEY = f"-----BEGIN RSA PRIVATE KEY-----\n{_KEY_LINES}\n-----END RSA PRIVATE KEY-----"

_AWS_SECRET = "wJalrXUtnFEMI/K7MDENG+" + "bPxRfiCYzzKEYzzKEY"

_SIGNS = "x^K9&mW!q2#Zt$L%"
_DJANGO = "p&l%385148kslhtyn^##a1)ilz@4zqj=rq&agdol^##zgl9(vs"

IN_TEXT: list[tuple[str, str]] = [
    (f"Authorization: Bearer {_MIXED}", _MIXED),
    ("POST /v1 HTTP/1.1\r\nauthorization: Basic dXNlcjpodW50ZXIyMg==\r\nAccept: */*", "dXNlcjpodW50ZXIyMg=="),
    (f"[(b'host', b'x'), (b'authorization', b'Bearer {_MIXED}')]", _MIXED),
    (f"> x-api-key: {_HEX}\n> content-type: application/json", _HEX),
    (f"PATH=/usr/bin\nOPENWEATHER_API_KEY={_HEX}\nHOME=/root", _HEX),
    (f"export AWS_SECRET_ACCESS_KEY={_AWS_SECRET}", _AWS_SECRET),
    ('{"Env": ["PATH=/usr/bin", "POSTGRES_PASSWORD=s3cr3t-pass", "LANG=C"]}', "s3cr3t-pass"),
    ("services:\n  db:\n    environment:\n      MYSQL_ROOT_PASSWORD: tr0ub4dor\n      TZ: UTC", "tr0ub4dor"),
    ("env:\n- name: CLIENT_SECRET\n  value: opensesame99\n", "opensesame99"),
    (f"aws_access_key_id = x\naws_secret_access_key = {_AWS_SECRET}\n", _AWS_SECRET),
    ('{"username": "me", "password": "hunter2"}', "hunter2"),
    ("host=db user=me password=hunter2 dbname=x", "hunter2"),
    *((f"GET /search?q=a&api_key={key}&page=2", key) for key in (_HEX, "8301927465019283")),
    ("postgresql://admin:sw0rdf!sh@db:5432/shop", "sw0rdf!sh"),
    ("git remote -v\norigin https://me:correct-horse@git.example.com/x.git (fetch)", "correct-horse"),
    (f"{PRIVATE_KEY}\n", _KEY_LINES),
    (json.dumps({"command": f"cat id_rsa <<EOF\n{PRIVATE_KEY}\nEOF"}), json.dumps(_KEY_LINES)[1:-1]),
    (json.dumps({"command": f"export CI_TOKEN={_MIXED}\nmake"}), _MIXED),
    (json.dumps({"output": json.dumps({"client_secret": _MIXED})}), _MIXED),
    (f"https://hooks.slack.com/services/T0AAAAAAA/B0BBBBBBB/{_MIXED[:24]}", _MIXED[:24]),
    (f"openai.AuthenticationError: Incorrect API key provided: {SHAPES['openai']}.", SHAPES["openai"]),
    *((f"A=1\n{name}=Zk39slQ2x\nB=2", "Zk39slQ2x") for name in ("DB_PASS", "SMTP_PASS", "DB_PWD")),
    *((f"{name}={_MIXED}\n", _MIXED) for name in ("GITHUB_PAT", "API_KEYS", "OPENAI_API_KEY_1", "API_KEY_OLD")),
    (f"API_KEYS={_MIXED},{_HEX}\n", f"{_MIXED},{_HEX}"),
    *((f"{at}'{it}'", it) for at, it in (("export DB_PASSWORD=", "p@ss w0rd!"), ("ENV DB_PASSWORD ", "correcthorse"))),
    (f"Cookie: session={_MIXED}\r\nAccept: */*", _MIXED),
    (f"{{'set-cookie': 'sid={_HEX}; HttpOnly; Path=/'}}", _HEX),
    ("tool --password S3cretPa55 --verbose", "S3cretPa55"),
    ('{"auths": {"example.com": {"auth": "bWU6Y29ycmVjdGhvcnNl"}}}', "bWU6Y29ycmVjdGhvcnNl"),
    ("Server=x;User Id=sa;Password=correcthorse;Encrypt=yes", "correcthorse"),
    (f"https://x.example.com/c?sv=2020&sig={_MIXED}%3D&se=1", f"{_MIXED}%3D"),
    (f"  token: {_MIXED}==\n", f"{_MIXED}=="),
    (f'password = "{_SIGNS}"', _SIGNS),
    (f"DB_PASSWORD={_SIGNS}\nHOST=db", _SIGNS),
    (f"SECRET_KEY = '{_DJANGO}'", _DJANGO),
    ("postgresql://app:p@ss#W0rd/1@db.example.com:5432/shop", "p@ss#W0rd/1"),
    (f'curl -H "DD-API-KEY: {_HEX}" https://x.example.com', _HEX),
    (f"FROM python:3.12\nENV API_KEY {_HEX}\nRUN make", _HEX),
    ("<user>me</user>\n<password>S3cret&Pa55</password>", "S3cret&Pa55"),
    (f"aws configure set aws_secret_access_key {_AWS_SECRET}\n", _AWS_SECRET),
    ("web ansible_host=10.0.0.1 ansible_ssh_pass=S3cret#Pa55 ansible_port=22", "S3cret#Pa55"),
    ("Server=x;Uid=sa;PWD=S3cret&(Pa55;Encrypt=yes", "S3cret&(Pa55"),
    ("registry=https://x\n//npm.example.com/:_auth=bWU6Y29ycmVjdGhvcnNl\n", "bWU6Y29ycmVjdGhvcnNl"),
    ("requests.get(url, auth=('me', 'S3cret#Pa55'))", "S3cret#Pa55"),
    (f"PRIVATE_KEY=0x{_HEX}{_HEX}\n", f"0x{_HEX}{_HEX}"),
    ("os.environ['SERVICE_TOKEN'] = 'S3cret#Pa55'", "S3cret#Pa55"),
    ("set -x API_TOKEN S3cretPa55\nset -gx DB_PASSWORD 'S3cret#1'", "S3cretPa55"),
    ("port 6379\nrequirepass S3cret#Pa55\n", "S3cret#Pa55"),
]
"""Text, and the secret in it."""

CLEAN: list[str] = [
    "commit 3f2a9c1b7e5d4f6a8b0c2d4e6f8a0b1c2d3e4f5a\nAuthor: A <a@example.com>",
    "id: 123e4567-e89b-12d3-a456-426614174000",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 8).decode(),
    'token = tokenizer.encode("hello")[0]',
    "tokens = 12345678\nmax_tokens=512, key=lambda item: item.name2",
    "def login(self, username: str, password: str) -> Session:",
    "self.client.login(username='testclient', password='password')",
    "parser.add_argument('--api-key', default=None, help='the key')",
    "api_key = os.environ['OPENAI_API_KEY']",
    'headers = {"Authorization": f"Bearer {self.api_key}"}',
    "curl -H 'Authorization: Bearer $TOKEN' https://example.com",
    "export OPENAI_API_KEY=<your key>\nexport HF_TOKEN=${HF_TOKEN}",
    "EOS_TOKEN=</s>\nPAD_TOKEN=0\nSORT_KEY=created_at\nMAX_TOKEN=100000",
    "SSH_KEY=/home/me/.ssh/id_ed25519",
    "primary_key=True, foreign_key='users.id', cache_key=md5sum12345",
    '{"token": "the", "logprob": -0.1, "bytes": [116]}',
    "git clone https://github.com/user/repo.git && psql postgresql://localhost:5432/shop",
    "see http://127.0.0.1:8000/@me and mailto:someone@example.com",
    'url = f"postgresql://{user}:{password}@{host}/{name}"',
    '<div class="sk-top-container sk-estimator-doc-link-fitted"><div class="sk-text-repr-fallback">',
    "from huggingface_hub import hf_hub_download, hf_hub_download_with_retries_and_cache",
    "def test_my_secret_is_kept(): assert '-----BEGIN PRIVATE KEY-----' in pem",
    "secret = secrets.token_hex(32)",
    "password = password_for_user_2\ntoken=next_token",
    'headers = {"x-api-key": literal_api_key or os.getenv("KEY")}',
    "https://example.com/a/very/long/path/2024/01/file_name_with_words-and-numbers-123.html",
    "pytest tests/test_tokens.py::test_key_is_found_1234567890",
    "PWD=/srv/project1\nOLDPWD=/home/you\nLAST_PWD=/home/me2\npwd=$(pwd); echo $PWD",
    "FILE_PATH=/etc/x1\nSEARCH_PAT=abc123\nPASS: test_case_1 passed\nBYPASS=build123456789\nfirst_pass=step1of2",
    "MAX_TOKENS=16777216\nSTOP_TOKENS=end_of_text\nSORT_KEYS=created_at2\ntokens_1 = next_tokens_2",
    '{"password": "Enter your password", "error": "Passwords do not match"}',
    "PASSWORD_PROMPT='Type it again'; password: \"must be at least 8 characters\"",
    "Set-Cookie: theme=dark; Path=/a1b2c3d4e5; Domain=app1.example.com\nThe cookie: it expires=20250101",
    'response.headers["Set-Cookie"] = f"session={session_id}"',
    "tool --password PASSWORD --token TOKEN --api-key $API_KEY --password-stdin --max-tokens 16777216",
    "docker run -u 1000:1000 image; curl -u user:password https://x; curl -u $USER:$PASS https://x",
    "mkdir -p build1234 && mysql -P3306 -p shop\nmysql --version; cp -pRv1 a b",
    '{"auth": "none", "auth": "bearer", "oauth": "enabled"}, auth=HTTPBasicAuth(user2, x)',
    "https://example.com/?sig=short&design=abcdefghijklmnopqrstuvwxyz",
    "task-key-names hvs.some_module.a_rather_long_function_name dp.pt.a_rather_long_function_name",
    "sqlplus scott:tiger@orcl; oracle://scott:tiger@db/orcl postgres://postgres:postgres@localhost redis://:secret@x/0",
    "mysql://user:password@localhost amqp://guest:guest@rabbit https://foo:bar@example.com https://u:p@x.y",
    "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY\nPASSWORD=changeme",
    "ENV API_KEY $API_KEY\nENV PASSWORD_FILE /run/secrets/p1\napi.key=${API_KEY_1}\n<password>${env.PASS1}</password>",
    "IDENTIFIED BY 'password'; auth=('user', 'pass'), auth=(user1, password1); My API key is missing2 days.",
    'logger.error("token: "+(0,N.O)(e1)); password = f"{user}-1{x}"; password = "%s1" % x; key: "<|unused_200054|>"',
    'secret = "V1SecretVolumeSource"; pass "HintPep484TypeVarFree" as a new one; _PAT = r"[A-Z0-9]+#[!@^]*"',
    "    password=settings.get(1, DEFAULT1),\n    token: dict[str, int2]\n    secret: Optional[Secret1] = None",
    "a.Digest(response=response), 12345678:AAA, SKIP0123456789, keyboard-0123456789abcdef0123456789abcdef",
]
"""What agents read and write all day."""
