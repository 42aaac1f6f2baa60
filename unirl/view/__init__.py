"""A place to look: runs and their trajectories as web pages, served from the run folders.

    server.py    routes        <- access.py (who may ask), answers.py (JSON)
    live.py      rows as they are written, for all who watch
    folders.py   which runs there are  <- files.py (what of them is read, and never left)
    summary.py, details.py, columns.py, episodes.py ...   what is known of one run

Run folders are only read: nothing is written into them, no lock is taken.
"""
