"""Conversations over the engine: tokenizers and chat templates.

Importing this package loads nothing heavy; its modules import what they need.
"""

__version__ = "0.1.0"
