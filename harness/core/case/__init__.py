"""The request: a case, its dims and features, loading it from YAML, and the options that a case may request."""
