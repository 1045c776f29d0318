"""What has to hold after every event, commit and job."""
