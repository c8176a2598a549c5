"""OpenAI's API: chat completions, completions, models, and vLLM's routes for tokens.

`routers` are its routes. Pieces for other dialects: `sampling` and `messages` map fields of
requests to settings and messages of the engine, `results` maps replies to usage, metrics, finish
reasons and log-probabilities, `chunks` makes events, and `replying` makes responses from running
generations.

Not here: responses and conversations.
"""

from lmchat.server.openai import chat, completions, models, tokens

routers = (chat.router, completions.router, models.router, tokens.router)
