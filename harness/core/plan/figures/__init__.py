"""Figures of a layout, computed from its plan: bytes of a rank, bytes over links, idle time of a pipeline, imbalance."""
