"""Records the chat in a terminal as an animated SVG for the README."""
