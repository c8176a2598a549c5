"""Text and token ids: tokenizers, chat templates, prompts, replies."""
