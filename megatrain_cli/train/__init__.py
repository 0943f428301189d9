"""The run: live objects, the loop, stopping."""
