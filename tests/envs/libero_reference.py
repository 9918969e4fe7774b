"""What LIBERO's own environment makes of an episode, in a process of its own: there robosuite draws, with an OpenGL
that it chooses when it is imported; the backend imports it without one.

    python libero_reference.py JOB OUT.npz

where JOB is JSON: task_file, assets, home (a folder for LIBERO's settings), gl, number, state, image_size, actions, and
package (the folder that the package libero is taken from; null: the installed one).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any], out: str) -> None:
    """Play the episode as LIBERO's public evaluations do and write down what they would take from it."""
    home = Path(job["home"])
    (home / "config.yaml").write_text("{}")
    if job["package"]:
        sys.path.insert(0, job["package"])
    os.environ.update(LIBERO_CONFIG_PATH=str(home), MUJOCO_GL=job["gl"])
    import libero.libero
    import numpy as np

    libero.libero._assets_path_cache = job["assets"]
    from libero.libero.envs import OffScreenRenderEnv
    from robosuite.utils.transform_utils import quat2axisangle

    height, width = job["image_size"]
    env = OffScreenRenderEnv(bddl_file_name=job["task_file"], camera_heights=height, camera_widths=width)
    env.seed(job["number"])
    env.reset()
    images, proprio, positions, done = [], [], [], []

    def look(seen: dict[str, Any]) -> None:
        views = [seen["agentview_image"], seen["robot0_eye_in_hand_image"]]
        images.append(np.stack([view[::-1, ::-1] for view in views]))
        rotation = quat2axisangle(seen["robot0_eef_quat"].copy())
        proprio.append(np.concatenate([seen["robot0_eef_pos"], rotation, seen["robot0_gripper_qpos"]]))
        positions.append(env.sim.data.qpos.copy())

    look(env.set_init_state(np.array(job["state"])))
    for action in job["actions"]:
        seen, _, solved, _ = env.step(action)
        done.append(solved)
        look(seen)
    np.savez(out, images=images, proprio=np.array(proprio, np.float32), positions=positions, done=done)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
