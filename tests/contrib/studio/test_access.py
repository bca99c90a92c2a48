"""Who gets in: one browser by its link, programs by the key; no page of another origin, by no name of another."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from openhands_rl_plugin.contrib.studio.access import StudioConfig
from openhands_rl_plugin.contrib.studio.server import running_studio
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

KEY = "a-key-of-this-test"


def studio(folder: Path, **options: object):
    return running_studio(
        StudioConfig.model_validate({"port": 0, **options}), StudioSources({"store": FileTrajectoryStorage(folder)})
    )


def test_the_link_opens_a_browser(tmp_path: Path) -> None:
    with studio(tmp_path) as running, httpx.Client(base_url=running.url) as one:
        assert one.get("/api/episodes").status_code == 401
        assert "set-cookie" not in one.get("/?token=wrong").headers
        opened = one.get(running.link)
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        kept = opened.headers["set-cookie"].lower()
        assert "httponly" in kept and "samesite=strict" in kept and running.tickets.token.lower() not in kept
        assert one.get("/api/episodes").json()["total"] == 0


def test_the_document_and_its_modules_are_shown_to_all_and_bind_the_browser(tmp_path: Path) -> None:
    with studio(tmp_path) as running, httpx.Client(base_url=running.url) as browser:
        page = browser.get("/e/some-id?view=tree")
        policy = page.headers["content-security-policy"]
        assert page.status_code == 200 and '<script type="importmap">' in page.text
        assert "default-src 'none'" in policy and "unsafe" not in policy and "trusted-types" in policy
        assert browser.get("/static/boot.mjs").headers["content-type"].startswith("text/javascript")
        for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py"):
            assert "Starlette(" not in browser.get(path).text
        browser.get(running.link)
        for path in ("/", "/static/boot.mjs", "/api/episodes", "/api/unknown"):
            response = browser.get(path)
            assert response.headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "studio.evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=str,
)
def test_pages_of_others_are_refused_with_the_cookie_too(tmp_path: Path, headers: dict[str, str]) -> None:
    with studio(tmp_path) as running, httpx.Client(base_url=running.url) as browser:
        browser.get(running.link)
        assert browser.get("/api/episodes").status_code == 200
        assert browser.get("/api/episodes", headers=headers).status_code == 403
        assert browser.post("/api/session", json={}, headers=headers).status_code == 403


def test_what_is_sent_has_to_name_its_origin(tmp_path: Path) -> None:
    with studio(tmp_path) as running, httpx.Client(base_url=running.url) as browser:
        token = {"key": running.tickets.token}
        own = {"Origin": running.url}
        assert browser.post("/api/session", json=token).status_code == 403
        assert browser.post("/api/session", content='{"key": "x"}', headers=own).status_code == 415
        assert browser.post("/api/session", json={"key": "wrong"}, headers=own).status_code == 401
        assert browser.post("/api/session", json=token, headers=own).status_code == 204
        assert browser.get("/api/episodes").status_code == 200


def test_another_address_needs_a_key_and_then_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENHANDS_RL_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"OPENHANDS_RL_API_KEY"), studio(tmp_path, host="0.0.0.0"):
        pass
    monkeypatch.setenv("OPENHANDS_RL_API_KEY", KEY)
    with studio(tmp_path, host="0.0.0.0", allow_host="studio.example.org") as running:
        url = running.url.replace("0.0.0.0", "127.0.0.1")
        with httpx.Client(base_url=url) as program:
            assert program.get("/api/episodes").status_code == 401
            assert program.get("/api/episodes", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
            for host, status in (("evil.example", 403), ("studio.example.org", 200), ("192.0.2.7:8400", 200)):
                assert program.get("/", headers={"Host": host}).status_code == status
            own = {"Origin": url}
            assert program.post("/api/session", json={"key": "wrong"}, headers=own).status_code == 401
            assert program.post("/api/session", json={"key": KEY}, headers=own).status_code == 204
            assert program.get("/api/episodes").status_code == 200
