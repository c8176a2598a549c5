"""The families with experts, one file of wiring each."""
