"""Tasks made from real packages: bugs that their own tests show, bug reports on them, and the quality gate.

Start with ``suite`` (what ``tasks make`` calls), then ``task_builder`` (one bug becomes one task) and ``quality_gate``.
"""
