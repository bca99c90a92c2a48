"""What every host of OpenHands shares, without importing OpenHands: episodes, recording, sessions, branches."""
