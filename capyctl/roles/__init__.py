"""What each role starts: which nurseries, listeners and rooms."""
