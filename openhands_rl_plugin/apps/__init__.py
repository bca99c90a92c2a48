"""Programs put together from the rooms below: agent, endpoint, loop, demo."""
