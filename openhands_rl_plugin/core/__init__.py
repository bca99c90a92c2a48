"""What everything else stands on: values, errors, interfaces, small tools. Imports only the standard library and
pydantic.

Start with ``types`` (the frozen values) and ``protocols`` (the interfaces); ``tree`` builds one episode.
"""
