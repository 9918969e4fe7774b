"""Run directories as readers see them: which files they hold, and what these say. Nothing here writes to a run."""
