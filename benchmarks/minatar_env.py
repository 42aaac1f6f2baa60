"""Registers MinAtar's games, which Gymnasium no longer finds by itself (pip install minatar)."""

from __future__ import annotations

import gymnasium
import minatar.gym

if "MinAtar/Breakout-v1" not in gymnasium.registry:
    minatar.gym.register_envs()
