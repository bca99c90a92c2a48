"""A policy as a product: conversations with tools, played by the same session that plays training episodes."""
