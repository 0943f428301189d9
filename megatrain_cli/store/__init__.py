"""Where the parameters live: host memory, one tile a layer."""
