"""Hostile requests against the four servers."""
