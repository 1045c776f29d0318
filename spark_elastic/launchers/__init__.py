"""Who gives a job its slots."""
