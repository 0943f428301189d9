"""What was asked: the schema of a run's YAML file, and reading it."""
