"""Software-engineering tasks: their rows, the places they run in, and the verdict on a patch."""
