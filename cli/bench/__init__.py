"""`lmchat bench`: measurements, each beside what this machine can do at best."""
