"""Simulators whose state is tensors on one device (envs/device.py): tasks in pure torch and on
MuJoCo Warp, adapters to other simulators, and exports to other libraries' interfaces."""
