"""The part that runs in the Spark driver: it decides who trains with whom."""
