"""Shared by all hosts of OpenHands, without importing OpenHands: episodes, recording, sessions, forks."""
