"""Repositories that tasks are made from: fetched, surveyed, installed. Start with ``sources``."""
