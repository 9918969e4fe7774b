"""LIBERO: 130 tabletop tasks of a Panda arm, simulated by robosuite and MuJoCo on the CPU.

- `info`: what it offers and what a config can get wrong, without importing it
- `tasks`: the tables and files behind that
- `simulator`: the registered simulator and its slots
- `driver`: its environments with less work around the same physics
- `upstream`: the same through its own interface (`env.driver: upstream`)
"""
