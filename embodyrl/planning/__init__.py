"""What a run would need, found out before anything is loaded: processes, parameters, batches, memory."""
