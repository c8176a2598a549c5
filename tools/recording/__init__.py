"""Records the chat in a terminal as an animated SVG for the README.

Not here: pictures of the chat page (`tools/pictures.py`).
"""
