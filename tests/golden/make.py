"""Writes golden files anew: ``PYTHONPATH=REPOSITORY:tests/golden python tests/golden/make.py NAME ...`` (all: no name).

The committed files were made by the tree that the package had before it was taken apart. A file that is made again is
another promise: its commit adds to ``differences.toml`` what became different and why.
"""

from __future__ import annotations

import sys

from artefacts import ARTEFACTS, missing_host
from golden import path_of, write

if __name__ == "__main__":
    for name in sys.argv[1:] or ARTEFACTS:
        if name in ARTEFACTS and not missing_host(ARTEFACTS[name].host):
            write(name, ARTEFACTS[name].make())
            print(name, path_of(name).stat().st_size)
