"""The text of replies: their tokens, parts and form."""
