"""What every HTTP server here shares: its socket, who is let in, how long a request may take, and its metrics."""
