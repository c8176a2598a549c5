"""`lmchat bench serve`: load on an HTTP server, and what its clients see."""
