"""Tasks on MuJoCo Warp, "warp/..."; all but tasks.py need its packages at import."""
