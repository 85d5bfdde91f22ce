"""What a layout costs, computed from its plan: bytes of a rank, bytes over links, idle time of a pipeline, imbalance."""
