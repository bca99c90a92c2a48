"""OpenHands V1 (``openhands-sdk`` 1.15 and newer), whose agents run in conversations."""
