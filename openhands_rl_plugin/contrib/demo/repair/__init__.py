"""The demo on code."""
