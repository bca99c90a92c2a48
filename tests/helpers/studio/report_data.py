"""What a file of the studio's pages has in it."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any


def data_of(file: Path) -> dict[str, Any]:
    """Address -> answer, read as the page reads it."""
    (found,) = re.findall(r'<script type="importmap">(.*?)</script>', file.read_text(encoding="utf-8"))
    module = base64.b64decode(json.loads(found)["imports"]["studio/data"].partition("base64,")[2]).decode()
    literal = module.removeprefix("export default JSON.parse(").removesuffix(");")
    return json.loads(json.loads(literal))
