"""What the six files at the top rest on: one concept a file, opened when needed."""
