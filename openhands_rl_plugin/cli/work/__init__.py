"""Commands with which the agent works: on a folder, in an editor, or on a task for a trainer."""
