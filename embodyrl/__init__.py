"""embodyrl: post-train vision-language-action models with reinforcement learning in robot simulators, from one YAML."""

from embodyrl.version import __version__

__all__ = ["__version__"]
