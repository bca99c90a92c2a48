"""What sandboxes cost, and what they hold."""
