"""pi0-FAST: actions are compressed tokens of a language model, chosen one after the other."""
