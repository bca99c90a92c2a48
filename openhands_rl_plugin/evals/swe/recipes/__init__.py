"""Set-up and test scripts of instances: SWE-bench, SWE-Gym, other suites. Start with ``recipe_of``."""
