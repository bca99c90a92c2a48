"""Write ``golden_renderings.json`` from the official templates: run this file."""

from __future__ import annotations

import json
from pathlib import Path

from conversations import FIXED, GOLDEN, fitting
from official_templates import HOW_TO_GET, official_template, official_text

from openhands_rl_plugin.core.templates.rendering import TEMPLATES


def main() -> None:
    golden: dict[str, dict[str, str]] = {}
    for family in sorted(TEMPLATES):
        if (template := official_template(family)) is None:
            raise SystemExit(f"the official template of {family} is not installed: {HOW_TO_GET}")
        golden[family] = {
            f"{name}, {len(tools)} tools": official_text(
                family, template, fitting(family, FIXED[name], tools), tools, True
            )
            for name, tools in GOLDEN
        }
    text = json.dumps(golden, ensure_ascii=False, indent=1)
    (Path(__file__).parent / "golden_renderings.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
