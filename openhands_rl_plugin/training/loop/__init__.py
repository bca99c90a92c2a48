"""Roll out, train, publish, measure, again: by turns (``sync``) or side by side (``asynchronous``)."""
