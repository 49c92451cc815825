"""What is stored: messages, trajectories, environments, preferences, verdicts, provenance, and the run store."""
