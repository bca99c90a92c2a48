"""Episodes as they are in use, and what the studio's pages take to show them."""
