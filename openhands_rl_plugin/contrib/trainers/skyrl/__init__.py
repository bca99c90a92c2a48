"""OpenHands as the generator of SkyRL 0.4 train, in the Python that has both."""
