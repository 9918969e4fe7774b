"""MetaWorld's tasks, task descriptions and cameras. Imports nothing heavy, so that a config is checked quickly."""

from __future__ import annotations

from embodyrl.envs.options import Proprio

TASKS = {
    "assembly-v3": "pick up the wrench and put its ring on the peg",
    "basketball-v3": "pick up the basketball and put it through the hoop",
    "bin-picking-v3": "pick up the object from one bin and place it in the other bin",
    "box-close-v3": "pick up the lid and close the box with it",
    "button-press-topdown-v3": "press the button from above",
    "button-press-topdown-wall-v3": "press the button from above, past the wall",
    "button-press-v3": "press the button",
    "button-press-wall-v3": "press the button, past the wall",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "take the wrench off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "hand-insert-v3": "insert the gripper into the hole",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-open-v3": "turn on the faucet",
    "faucet-close-v3": "turn off the faucet",
    "hammer-v3": "pick up the hammer and drive the nail in",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "insert the peg into the hole in the side of the box",
    "pick-place-wall-v3": "pick up the puck and place it at the goal behind the wall",
    "pick-out-of-hole-v3": "pick the puck out of the hole",
    "push-back-v3": "pull the puck back to the goal",
    "push-v3": "push the puck to the goal",
    "pick-place-v3": "pick up the puck and place it at the goal",
    "plate-slide-v3": "slide the plate into the net",
    "plate-slide-side-v3": "slide the plate sideways into the net",
    "plate-slide-back-v3": "slide the plate back out of the net",
    "plate-slide-back-side-v3": "slide the plate sideways out of the net",
    "peg-unplug-side-v3": "pull the peg out of the hole",
    "soccer-v3": "push the ball into the goal",
    "stick-push-v3": "pick up the stick and push the thermos with it",
    "stick-pull-v3": "pick up the stick and pull the thermos with it",
    "push-wall-v3": "push the puck around the wall to the goal",
    "reach-v3": "reach the goal position",
    "reach-wall-v3": "reach the goal position behind the wall",
    "shelf-place-v3": "pick up the puck and place it on the shelf",
    "sweep-into-v3": "sweep the puck into the hole",
    "sweep-v3": "sweep the puck off the table",
    "window-open-v3": "slide the window open",
    "window-close-v3": "slide the window closed",
}
"""Task name -> task description."""

CAMERAS = {
    "corner": True,
    "corner2": True,
    "corner3": True,
    "corner4": True,
    "topview": False,
    "behindGripper": False,
    "gripperPOV": False,
}
"""Camera name -> whether it is mounted upside down, so that its images have to be turned by 180 degrees."""


PROPRIO_DIM = {Proprio.full: 39, Proprio.robot: 4}
"""Size of the state (S), by `env.proprio`."""

ACTION_DIM = 4
"""Size of an action (D): displacement of the end effector (3), and the gripper."""


STEP_LIMIT = 500
"""Longest episode that MetaWorld allows [steps]."""


STEPS_PER_S = 80.0
"""Steps of MetaWorld per simulated second [Hz]."""
