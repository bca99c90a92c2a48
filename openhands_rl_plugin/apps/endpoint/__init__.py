"""Serves a trained policy with tools over an OpenAI-compatible API, with the rollout code of training."""
