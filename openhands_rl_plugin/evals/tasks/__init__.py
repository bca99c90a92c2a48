"""Tasks made from real packages: bugs that their own tests prove, reports on them, and the quality gate."""
