"""The storage ``mongodb``. Only ``storage`` imports ``pymongo``."""
