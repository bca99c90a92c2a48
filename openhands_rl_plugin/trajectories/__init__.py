"""Stored trajectories: storages, formats of others, tables and pages, and causes of token drift."""
