"""What is left, lost or done twice when commands are ended at any moment."""
