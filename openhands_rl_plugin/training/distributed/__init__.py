"""Training in several processes: the ranks of a launcher, their collectives and shards."""
