"""OpenAI's Responses and Conversations.

A conversation is a durable session, and a response is a turn of one: their ids contain the
session's id and the turn's, so that a response is found after a restart without a table of its own.
A second answer to an earlier response is a branch of the session; while the session generates, the
answer is made in a fork. Such sessions have the tag `TAG`.

Not here: chat completions (`lmchat.server.openai`), and sessions under their own URLs
(`lmchat.server.sessions`).
"""

from lmchat.store.records import HIDDEN_TAG as TAG

RESPONSE = "response"
"""First word of the names of sessions that were made for one response and those that follow it."""

__all__ = ["RESPONSE", "TAG"]
