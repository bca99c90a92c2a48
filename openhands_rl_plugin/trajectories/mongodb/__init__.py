"""The storage ``mongodb``. Start with ``storage``; ``pymongo`` is imported here only."""
