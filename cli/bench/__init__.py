"""`lmchat bench`: measurements, each beside the ceilings of this machine."""
