"""What `training.evaluate` is made of: chats with a question at their end, and what to count."""
