"""Commands with which the agent works: on a folder of the user, in an editor, or on a task for a trainer."""
