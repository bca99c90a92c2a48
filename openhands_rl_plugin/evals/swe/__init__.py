"""Software-engineering tasks in SWE-bench's format: reading, setting up, testing and grading.

Read in this order: ``dataset`` reads a row, ``recipes`` says how it is set up and tested, ``backends`` set it up,
``grading`` applies a patch and runs the tests in them, ``recipes/parsers`` reads the log, ``resolution`` compares the
outcomes with FAIL_TO_PASS and PASS_TO_PASS, ``guard`` looks for reward hacking. ``run_evaluation`` grades many.
"""
