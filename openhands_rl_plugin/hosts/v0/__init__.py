"""OpenHands V0 (``openhands-ai`` 1.6). Importing this package loads nothing of OpenHands."""
