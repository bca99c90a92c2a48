"""The SDK's ``terminal`` and ``file_editor`` over the project's sandbox, which search can fork."""
