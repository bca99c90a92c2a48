"""RLAgent behind the Agent Client Protocol, which editors and GUIs speak with agents."""
