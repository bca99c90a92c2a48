"""The recorder: it samples completions for a host, or passes on a client's requests, and stores them before use."""
