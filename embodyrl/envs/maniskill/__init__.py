"""ManiSkill 3 (SAPIEN, PhysX): state observations and images, on the CPU or as one batch on a GPU.

- `info`: what it offers and what a config can get wrong, without importing it
- `tasks`: tasks, assets and task descriptions, read from its files
- `simulator`: the registered simulator; one environment per slot (CPU)
- `batch`: all slots of a process in one environment (GPU)
- `loading`: importing ManiSkill, building one of its environments, and what that offers
- `driver`: an environment class with less around the same physics
- `upstream`: ManiSkill's own environments (`env.driver: upstream`)
"""
