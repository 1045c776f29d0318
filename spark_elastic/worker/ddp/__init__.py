"""DistributedDataParallel: torch's wrapper that outlives generations, and how it weights gradients by rows."""
