"""Commands with which the agent works on a folder of the user's."""
