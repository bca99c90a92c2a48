"""Options and printing that several commands share."""
