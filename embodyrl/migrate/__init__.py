"""Configs of other programs become configs of embodyrl: today those of RLinf, for `embodyrl migrate`."""
