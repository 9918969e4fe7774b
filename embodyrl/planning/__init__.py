"""Plan a run before anything is loaded: processes, parameters, batches, memory."""
