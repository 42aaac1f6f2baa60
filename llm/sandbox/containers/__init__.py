"""Boxes that are containers of a daemon: Docker, Podman, and runtimes such as gVisor below them."""
