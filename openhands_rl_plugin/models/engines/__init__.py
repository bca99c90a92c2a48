"""Clients of models behind ``core.protocols.LLMEngine``: ``openai`` over HTTP, ``transformers`` in process."""
