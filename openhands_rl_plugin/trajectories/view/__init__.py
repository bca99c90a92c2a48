"""Views of a store: one episode, a list of them, and figures over all. Reads only; needs no plugin."""
