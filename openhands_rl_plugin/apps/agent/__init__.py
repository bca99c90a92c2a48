"""``RLAgent(model, tokenizer, config)``: ``run()`` and ``train()`` in one object. Start with ``rl_agent``."""
