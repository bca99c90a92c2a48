"""OpenHands as an agent of Harbor: its Python imports ``agent``, and the one with OpenHands runs ``episode``.

Between them is ``bridge``: what OpenHands does, it does in the environment that Harbor made, where its verifier looks.
"""
