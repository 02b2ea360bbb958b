"""What a model is: headers, digests, facts and the sums over them. Import from the modules."""
