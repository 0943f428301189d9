"""The conversation: one file a command."""
