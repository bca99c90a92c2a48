"""Episodes in worker processes of this machine (``processes``) or of a Ray cluster (``ray_workers``)."""
