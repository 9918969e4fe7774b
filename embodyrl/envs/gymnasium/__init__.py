"""Any registered Gymnasium environment.

- `tasks`: what it offers and what a config can get wrong, without importing it
- `simulator`: the registered simulator and its slots
"""
