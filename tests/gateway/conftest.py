import sys
from pathlib import Path

# The tiny models on disk are shared with the server's tests.
sys.path.append(str(Path(__file__).parents[1] / "serving"))
