"""Perturbations of episodes: what is drawn for each kind and level, and those of images and task descriptions.

Numpy only: `mujoco/scene_changes.py` shows what is drawn in a MuJoCo scene, and simulators place robot and objects by
their own means. Everything derives from the seed of an episode, a kind and a level, so that it is the same in any
process, after a resume, and in both episodes of a pair.
"""
