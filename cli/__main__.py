"""`python -m lmchat.cli` is `lmchat`."""

from .main import main

main()
