"""What happens to a job: a schedule made from a seed, and how its faults strike."""
