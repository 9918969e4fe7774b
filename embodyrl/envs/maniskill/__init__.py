"""ManiSkill 3 (SAPIEN, PhysX): state observations and pictures, on the CPU or as one batch on a GPU.

- `catalogue`: tasks, their assets and sentences, read without importing ManiSkill
- `rules`: what is wrong with a config, before anything starts
- `loading`: importing ManiSkill and building one of its environments
- `driver`: an environment class with less around the same physics
- `actions`: what the entries of an action mean
- `slots`: one environment per slot (CPU)
- `batch`: all slots of a process in one environment (GPU)
"""
