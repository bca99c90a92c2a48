"""How many planted secrets are taken out, and how much ordinary source is touched."""
