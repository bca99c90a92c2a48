"""Templates: conversations as text, and calls read out of text."""
