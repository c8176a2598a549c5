"""`lmchat serve`: options of the HTTP server, and its process."""
