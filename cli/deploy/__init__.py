"""`lmchat deploy`: the commands, and the options of `serve` that are passed on.

Not here: what a deployment is and does (`lmchat.deploy`).
"""
