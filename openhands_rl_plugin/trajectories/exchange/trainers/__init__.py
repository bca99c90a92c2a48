"""Episodes in the formats of other trainers. No trainer is imported: rows are plain values with their field names."""
