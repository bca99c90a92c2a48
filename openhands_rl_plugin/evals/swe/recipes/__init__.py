"""How a repository task is set up and tested: SWE-bench, SWE-Gym, own suites. Start with ``recipe_of``."""
