"""All checks of an installation, in the order of dependence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from openhands_rl_plugin.cli.doctor_checks.disk import check_adapters, check_episodes, check_storage
from openhands_rl_plugin.cli.doctor_checks.findings import Finding, fail, ok
from openhands_rl_plugin.cli.doctor_checks.installation import check_installation
from openhands_rl_plugin.cli.doctor_checks.services import check_environment_server, check_model_server
from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.config.workspace import PromptName
from openhands_rl_plugin.core.errors import ConfigError, MissingExtraError

_INSTRUCTIONS: Mapping[PromptName, str] = {
    "standard": "OpenHands' own ([rl.workspace] prompt): a model needs a context of 16,384 tokens or more",
    "compact": "RLAgent's short ones ([rl.workspace] prompt), under 700 tokens",
}


async def check_all(config: Path | None, *, probe: bool = False, registration: bool = True) -> list[Finding]:
    """Every check. Servers are checked only with a ``config``; without it the other checks use the defaults."""
    findings = list(check_installation(registration=registration))
    settings = RLSettings()
    if config is not None:
        try:
            settings = load_settings(config)
        except ConfigError as error:
            return [*findings, *(fail("configuration", line, "") for line in str(error).splitlines())]
        findings += [ok("configuration", str(config)), ok("instructions", _INSTRUCTIONS[settings.workspace.prompt])]
    findings += await _storage(settings)
    findings += check_adapters(settings.serving.adapters_directory, settings.serving.adapter)
    if config is None:
        return findings
    if settings.serving.base_url:
        serving = settings.serving
        findings += check_model_server(serving.base_url, serving.model, serving.api_key(), probe=probe)
    findings.append(check_environment_server(settings.environment_url))
    return findings


async def _storage(settings: RLSettings) -> list[Finding]:
    try:
        storage = open_storage(settings)
    except (ConfigError, MissingExtraError) as error:
        return [fail("storage", str(error), "")]
    try:
        if settings.storage_backend == "file":
            return await check_storage(settings.storage.directory, storage)
        return [await check_episodes(settings.storage_backend, storage)]
    finally:
        await storage.close()
