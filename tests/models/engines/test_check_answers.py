"""Whether something listens is asked as the engine would connect."""

from __future__ import annotations

import pytest

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.models.engines.server_models import check_answers


def test_nothing_there_is_one_line() -> None:
    for away in ("https://127.0.0.1:9/v1", "http://127.0.0.1:9/v1"):
        with pytest.raises(InfrastructureError, match="no model server answers"):
            check_answers(away)


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999/v1", "ftp://127.0.0.1/v1", "http://[::1/v1"])
def test_a_wrong_url_names_the_option(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--base-url .* is not a URL"):
        check_answers(url)
