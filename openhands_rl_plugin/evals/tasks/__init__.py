"""Makes tasks from real packages: bugs that their tests detect, bug reports, and the quality gate.

Start with ``suite`` (what ``tasks make`` calls), then ``task_builder`` (one bug becomes one task) and ``quality_gate``.
"""
