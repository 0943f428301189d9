"""Whether a run fits, and what it will hold."""
