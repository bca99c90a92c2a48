"""What is wrong, and what to change: drift between the turns of stored episodes, and the installation itself."""
