"""An iteration as a graph of named nodes."""
