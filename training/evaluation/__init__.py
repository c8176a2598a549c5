"""Parts of `training.evaluate`: chats that end with a question, and the counting of answers."""
