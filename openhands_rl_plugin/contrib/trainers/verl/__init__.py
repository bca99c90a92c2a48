"""OpenHands as an agent loop of verl 0.9, in the Python of verl; OpenHands itself is in another one."""
