"""Training on a server of the Tinker API in the place of this machine: ``trainer`` first."""
