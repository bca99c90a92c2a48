"""A network for chosen hosts only: a proxy outside of the sandbox, which has no other way out.

``allowed`` says which hosts, ``proxy`` is the program that decides, ``session`` starts and ends it with a sandbox.
"""
