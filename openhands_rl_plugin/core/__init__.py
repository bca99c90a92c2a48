"""What everything else stands on: values, errors, seams, small tools. Imports only the standard library and pydantic.

Start with ``types`` (the frozen values) and ``protocols`` (the seams); ``tree`` builds one episode.
"""
