"""OpenAI's API: chat completions, completions, models, and vLLM's routes for tokens.

`routers` are its routes, `chunks` makes events, and `replying` makes responses from running
generations.

Not here: responses and conversations (`lmchat.server.responses`), and how fields of requests become
settings and messages (`lmchat.server.dialects`).
"""

from lmchat.server.dialects import models
from lmchat.server.openai import chat, completions, tokens

routers = (chat.router, completions.router, models.router, tokens.router)
