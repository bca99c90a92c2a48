"""Records of other agents, and of the data sets made of them."""
