"""Several model servers with the same weights behind one address."""
