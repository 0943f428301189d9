"""How layers pass through the device: the schedule, its proof, its execution."""
