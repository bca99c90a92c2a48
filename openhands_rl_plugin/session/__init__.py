"""The recorder: it samples completions for a host, searches, and stores them before they are executed."""
