"""Training in several processes: collectives and shards (``ranks``), and a trainer that starts them (``launched``)."""
