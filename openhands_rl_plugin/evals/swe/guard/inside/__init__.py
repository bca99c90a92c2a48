"""What the guard puts beside the tests. These files are shown to the tests' shell and Python, never imported here, and
have to work with bash 4.4, Python 3.6 and every pytest since 3.
"""
