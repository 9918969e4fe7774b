"""Learning methods: a folder for each, and for families of them; `builtin.py` has a line for each."""
