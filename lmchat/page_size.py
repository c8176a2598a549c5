"""The page size, for code that must not load the extension: `lmchat` imports in 2 milliseconds.

The one definition is kPageTokens in cpp/cache/kv_layout.h; a test compares the two.
"""

PAGE_TOKENS = 64
