"""How a Plan is executed: inline (one process) or in processes with shared memory."""
