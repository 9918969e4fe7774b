"""Any registered Gymnasium environment.

- `info`: what it offers and what a config can get wrong, without importing it
- `tasks`: the tables and files behind that
- `simulator`: the registered simulator and its slots
"""
