"""The query language of lists, statistics, exports and the studio. Start with ``language.parse_query``."""
