"""Being here puts this folder on the import path, for the helpers that several test folders share."""
