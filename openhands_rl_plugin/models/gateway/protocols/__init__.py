"""The protocols that are recorded: chat completions, Anthropic's Messages and OpenAI's Responses, as one format."""
