"""A recording judged: by a declared layout, or by another recording that is trusted."""
