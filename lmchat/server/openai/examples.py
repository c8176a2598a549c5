"""Request examples for the OpenAPI page."""

from __future__ import annotations

from typing import Any

_QUESTION = {"role": "user", "content": "My dog is called Waffles."}

CHAT: dict[str, Any] = {
    "chat": {
        "summary": "A conversation",
        "value": {"model": "memo", "messages": [_QUESTION], "max_completion_tokens": 64},
    },
    "stream": {
        "summary": "A stream with usage and prompt progress",
        "value": {
            "model": "memo",
            "messages": [_QUESTION],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
        },
    },
    "session": {
        "summary": "The next turn of a durable session",
        "value": {"model": "memo", "session": "pets", "messages": [_QUESTION]},
    },
}

COMPLETION: dict[str, Any] = {
    "text": {
        "summary": "A text to continue",
        "value": {"model": "memo", "prompt": "My dog is called", "max_tokens": 16},
    },
    "several": {
        "summary": "Several prompts as token ids",
        "value": {"model": "memo", "prompt": [[0, 2], [0, 3]], "max_tokens": 8},
    },
}

TOKENIZE: dict[str, Any] = {
    "text": {"summary": "A text", "value": {"model": "memo", "prompt": "Hello"}},
    "chat": {
        "summary": "A conversation, as the chat template renders it",
        "value": {"model": "memo", "messages": [_QUESTION], "return_token_strs": True},
    },
}

DETOKENIZE: dict[str, Any] = {
    "tokens": {"summary": "Token ids", "value": {"model": "memo", "tokens": [0, 2]}}
}
