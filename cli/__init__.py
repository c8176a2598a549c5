"""The `lmchat` command; installs as `lmchat.cli`."""
