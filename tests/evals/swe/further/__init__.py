"""More attacks and honest patches, by what they go through."""
