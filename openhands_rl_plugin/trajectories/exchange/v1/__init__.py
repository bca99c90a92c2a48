"""Stored conversations of OpenHands' V1 SDK, read and written."""
