"""Training in several processes: collectives and sharded weights (``ranks``), a trainer that starts them (``launched``)."""
