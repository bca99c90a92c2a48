"""How fast the parts are. Every figure in README.md is printed by a program of this folder."""
