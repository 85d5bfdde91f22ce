"""What is requested: a case, its dims and features, loading it from YAML, and which cases there are to request."""
