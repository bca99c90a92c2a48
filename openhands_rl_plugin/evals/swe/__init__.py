"""SWE-bench instances: reading, set-up, tests and grading.

Read in this order: ``instances`` reads a row, ``recipes`` gives its scripts, ``backends`` set it up, ``grading``
applies a patch, runs the tests in them and compares the outcomes with FAIL_TO_PASS and PASS_TO_PASS, ``guard`` detects
reward hacking.
"""
