"""What survives a reset: states, the copies that are their commits, and how a rank catches up."""
