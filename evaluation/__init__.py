"""Measuring the package from outside: it imports public names only."""
