"""The Gemma families, one file of wiring each."""
