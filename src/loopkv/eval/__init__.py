"""What a plan does to answers and predictions."""
