"""Where bytes of trajectories are: SQLite, Postgres, a bucket."""
